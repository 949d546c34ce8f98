"""Replace a Gather of one index by a Slice, which is a view where a Gather copies.

    Gather(x, i, axis) = Reshape(Slice(x, i, i + 1, axis), shape)       for a constant scalar i
"""
from __future__ import annotations

from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, P, Rule, Value


class GatherOfOne(Rule):
    """Replace a Gather of one index, except along the batch and along the last axis, where a Slice is no view."""
    pattern = P("Gather", Value("x"), Constant("index"))

    def check(self, match: Match) -> bool:
        shape = match.shape(match.value("x"))
        axis = match.root.attrs.get("axis", 0) % len(shape)
        return match.constant("index").ndim == 0 and axis < len(shape) - 1 and isinstance(shape[axis], int)

    def rewrite(self, match: Match, draft: Draft) -> None:
        shape = match.shape(match.value("x"))
        axis = match.root.attrs.get("axis", 0) % len(shape)
        start = as_int(match.constant("index").item()) % as_int(shape[axis])
        draft.finish_view("Reshape", draft.cut(match.value("x"), axis, start, start + 1))
