"""Recognise norms along the last axis, and fold scales and shifts into them.

    c = x - mean(x);  c / sqrt(mean(c * c) + epsilon) = c * (1 / sqrt(...)) = LayerNormalization(x, 1)
    LayerNormalization(x, g, b) * k + d = LayerNormalization(x, k g, k b + d)
    x / sqrt(mean(x * x) + epsilon) = x * (1 / sqrt(...)) = RMSNormalization(x, 1)
    RMSNormalization(x, g) * k = RMSNormalization(x, k g)
    x / max(sqrt(sum(x * x)), epsilon) = LpNormalization(x)
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.passes.rewriting.facts import per_channel
from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, No, P, Rule, Value

SMALL = 1e-10       # lower bounds of a norm up to this affect only rows of zeros, which LpNormalization leaves zero

_VARIANCE = P("ReduceMean", P("Mul", Value("c"), Value("c")), bind="variance")
_DEVIATION = P("Sqrt", P("Add", _VARIANCE, Constant("epsilon")))


def _over_last_axis(graph: Graph, reduction: Node) -> bool:
    """Return True if a node reduces the last axis alone and keeps it with extent 1."""
    rank = len(graph.shape(reduction.inputs[0]))
    axes = [axis % rank for axis in reduction.attrs.get("axes", range(rank))]
    return axes == [rank - 1] and bool(reduction.attrs.get("keepdims", 1))


def _centred(graph: Graph, name: str) -> tuple[Node, Node] | None:
    """Return (mean, subtraction) if the tensor is x - mean(x) along the last axis, else None."""
    subtraction = graph.producer.get(name)
    if subtraction is None or subtraction.op != "Sub":
        return None
    mean = graph.producer.get(subtraction.inputs[1])
    if mean is None or mean.op != "ReduceMean" or mean.inputs[0] != subtraction.inputs[0]:
        return None
    return (mean, subtraction) if _over_last_axis(graph, mean) else None


class RmsNorm(Rule):
    """Recognise x / sqrt(mean(x * x) + epsilon)."""
    pattern = P("Div", Value("c"), _DEVIATION)

    def check(self, match: Match) -> bool | No:
        if not _over_last_axis(match.graph, match["variance"]):
            return False
        if match.constant("epsilon").size != 1:
            return No("its epsilon is more than one number")
        return (isinstance(match.type.shape[-1], int)
                and match.type.shape == match.shape(match.value("c")))

    def rewrite(self, match: Match, draft: Draft) -> None:
        self._finish(match, draft, "RMSNormalization", match.value("c"))

    @staticmethod
    def _finish(match: Match, draft: Draft, op: str, x: str) -> None:
        """Finish with a norm of x with scale 1."""
        kind = match.type
        ones = draft.constant("scale", np.ones(int(kind.shape[-1]), kind.dtype))
        draft.finish(op, [x, ones], {"axis": len(kind.shape) - 1,
                                     "epsilon": float(match.constant("epsilon").reshape(()))})


class RmsNormByReciprocal(RmsNorm):
    """Recognise x * (1 / sqrt(mean(x * x) + epsilon))."""
    pattern = P("Mul", Value("c"), P("Reciprocal", _DEVIATION))


class LayerNorm(RmsNorm):
    """Recognise c / sqrt(mean(c * c) + epsilon) with c = x - mean(x)."""

    def check(self, match: Match) -> bool | No:
        return _centred(match.graph, match.value("c")) is not None and super().check(match)

    def rewrite(self, match: Match, draft: Draft) -> None:
        parts = _centred(match.graph, match.value("c"))
        assert parts is not None
        draft.absorb(*parts)
        self._finish(match, draft, "LayerNormalization", parts[0].inputs[0])


class LayerNormByReciprocal(LayerNorm):
    pattern = RmsNormByReciprocal.pattern


class NormScale(Rule):
    """Fold a Mul by one constant per channel into a norm, or an Add into a LayerNormalization."""
    pattern = P("Mul Add", P("LayerNormalization RMSNormalization", Value("x"), Constant("scale"), bind="norm"),
                Constant("constant"))

    def check(self, match: Match) -> bool:
        norm = match["norm"]
        return ((norm.op == "LayerNormalization" or match.root.op == "Mul")
                and norm.attrs.get("axis", -1) % self._rank(match) == self._rank(match) - 1
                and match.type.shape == match.shape(norm.outputs[0])
                and all(name in match.graph.constants for name in norm.inputs[1:] if name)
                and self._vector(match) is not None)

    def rewrite(self, match: Match, draft: Draft) -> None:
        norm, vector = match["norm"], self._vector(match)
        scale = match.constant("scale").reshape(-1)
        if norm.op == "RMSNormalization":
            draft.finish(norm.op, [match.value("x"), draft.constant("scale", scale * vector)], norm.attrs)
            return
        bias: Array = match.graph.constants[norm.inputs[2]].reshape(-1) if norm.inputs[2:] else np.zeros_like(scale)
        scale, bias = (scale * vector, bias * vector) if match.root.op == "Mul" else (scale, bias + vector)
        inputs = [match.value("x"), draft.constant("scale", scale), draft.constant("bias", bias)]
        draft.finish("LayerNormalization", inputs, norm.attrs)

    @staticmethod
    def _rank(match: Match) -> int:
        return len(match.shape(match.value("x")))

    def _vector(self, match: Match) -> Array | None:
        rank = self._rank(match)
        return per_channel(match.constant("constant"), rank, match.constant("scale").size, rank - 1)


class L2Norm(Rule):
    """Recognise x / Clip(ReduceL2(x), epsilon), the last step of sentence encoders."""
    pattern = P("Div", Value("x"), P("Clip", P("ReduceL2", Value("x"), bind="norm"), bind="clip"))

    def check(self, match: Match) -> bool | No:
        low, high = match["clip"].attrs.get("min", 0.0), match["clip"].attrs.get("max", np.inf)
        if not _over_last_axis(match.graph, match["norm"]):
            return No("only a norm along the last axis has a kernel")
        return 0 <= low <= SMALL and high == np.inf or No("its bound changes rows that are not zero")

    def rewrite(self, match: Match, draft: Draft) -> None:
        axis = len(match.shape(match.value("x"))) - 1
        draft.finish("LpNormalization", [match.value("x")], {"axis": axis, "p": 2})


class L2NormExpanded(L2Norm):
    """Recognise x / Clip(ReduceL2(x), epsilon) whose denominator is expanded by a separate node."""
    pattern = P("Div", Value("x"), P("Expand", P("Clip", P("ReduceL2", Value("x"), bind="norm"), bind="clip")))


NORMS = (LayerNorm(), LayerNormByReciprocal(), RmsNorm(), RmsNormByReciprocal(), NormScale(), L2Norm(),
         L2NormExpanded())
