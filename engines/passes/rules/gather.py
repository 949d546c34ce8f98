"""One index of an axis is a cut, which is a view where a Gather would be a copy.

    Gather(x, i, axis) = Reshape(Slice(x, i, i + 1, axis), shape)       for one constant number i
"""
from __future__ import annotations

from engines.passes.rewriting.rewrite import Constant, Draft, Match, P, Rule, Value


class GatherOfOne(Rule):
    """Not of the leading axis, which is the items'; not of the last, whose elements a view must keep together."""
    pattern = P("Gather", Value("x"), Constant("index"))

    def check(self, match: Match) -> bool:
        rank, axis = len(match.shape(match.value("x"))), match.root.attrs.get("axis", 0)
        return match.constant("index").ndim == 0 and 0 < axis % rank < rank - 1

    def rewrite(self, match: Match, draft: Draft) -> None:
        shape = match.shape(match.value("x"))
        axis = match.root.attrs.get("axis", 0) % len(shape)
        start = int(match.constant("index")) % int(shape[axis])
        draft.finish_view("Reshape", draft.cut(match.value("x"), axis, start, start + 1))
