"""What works along one axis works along the innermost, where kernels want it.

    Softmax(x, axis) = Transpose(Softmax(Transpose(x)), back)
"""
from __future__ import annotations

from engines.ir.graph import TensorType
from engines.passes.rewriting.rewrite import Draft, Match, P, Rule, Value


class AlongInnermost(Rule):
    """Once layouts are settled: an image's channels are innermost then."""
    pattern = P("Softmax LogSoftmax LpNormalization", Value("x"))

    def check(self, match: Match) -> bool:
        rank = len(match.shape(match.value("x")))
        return bool(0 < match.root.attrs.get("axis", -1) % rank < rank - 1)

    def rewrite(self, match: Match, draft: Draft) -> None:
        x = match.value("x")
        shape, kind = match.shape(x), match.graph.types[x]
        axis, last = match.root.attrs["axis"] % len(shape), len(shape) - 1
        perm = (*(a for a in range(len(shape)) if a != axis), axis)
        moved = TensorType(kind.dtype, tuple(shape[a] for a in perm))
        rows = draft.node("Transpose", [x], moved, {"perm": perm})
        made = draft.node(match.root.op, [rows], moved, {**match.root.attrs, "axis": last})
        draft.finish("Transpose", [made], {"perm": tuple(perm.index(a) for a in range(len(shape)))})
