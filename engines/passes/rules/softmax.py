"""Move the axis of Softmax and other norms along one axis to the innermost position, as kernels require.

    Softmax(x, axis) = Transpose(Softmax(Transpose(x)), back)
"""
from __future__ import annotations

from infer_server.engines.passes.rewriting.rewrite import Draft, Match, P, Rule, Value


class AlongInnermost(Rule):
    """Transpose around a Softmax that is not along the last axis. Runs after layouts are chosen (channels last)."""
    pattern = P("Softmax LogSoftmax LpNormalization", Value("x"))

    def check(self, match: Match) -> bool:
        rank = len(match.shape(match.value("x")))
        return bool(0 < match.root.attrs.get("axis", -1) % rank < rank - 1)

    def rewrite(self, match: Match, draft: Draft) -> None:
        x = match.value("x")
        rank = len(match.shape(x))
        axis = match.root.attrs["axis"] % rank
        perm = (*(a for a in range(rank) if a != axis), axis)
        rows = draft.node("Transpose", [x], {"perm": perm})
        made = draft.node(match.root.op, [rows], {**match.root.attrs, "axis": rank - 1})
        draft.finish("Transpose", [made], {"perm": tuple(perm.index(a) for a in range(rank))})
