"""Rewrite pointwise arithmetic in canonical form, and recognise activations.

    Clip(x, 0, inf) = Max(x, 0) = Relu(x)           x ** 2 = x * x        x - c = x + (-c)        x / c = x * (1 / c)
    1 / x = Reciprocal(x)
    (x + c) + d = x + (c + d)
    Clip(x + 3, 0, 6) / 6 = HardSigmoid(x)          x * HardSigmoid(x) = HardSwish(x)
    x * Sigmoid(x) = Swish(x)                       x * Tanh(Softplus(x)) = Mish(x)
    x * (1 + Erf(x / sqrt 2)) / 2 = Gelu(x)
"""
from __future__ import annotations

import math

import numpy as np

from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, P, Rule, Value


def _near(match: Match, bind: str, number: float) -> bool:
    """Return True for a constant of one element close to `number`, which exporters may have rounded."""
    constant = match.constant(bind)
    return constant.size == 1 and math.isclose(float(constant.reshape(())), number, rel_tol=1e-4)


def bounds(node: Node) -> tuple[float, float]:
    """Return (low, high) of a Clip or Relu."""
    if node.op == "Relu":
        return 0.0, math.inf
    return float(node.attrs.get("min", -math.inf)), float(node.attrs.get("max", math.inf))


def _finish_clip(match: Match, draft: Draft, x: str, low: float, high: float) -> None:
    if (low, high) == (-math.inf, math.inf):
        draft.same_as(x)
    elif (low, high) == (0.0, math.inf):
        draft.finish("Relu", [x])
    else:
        draft.finish("Clip", [x], {"min": low, "max": high})


class ClipToRelu(Rule):
    pattern = P("Clip", Value("x"))

    def check(self, match: Match) -> bool:
        return bounds(match.root) in ((0.0, math.inf), (-math.inf, math.inf))

    def rewrite(self, match: Match, draft: Draft) -> None:
        _finish_clip(match, draft, match.value("x"), *bounds(match.root))


class ExtremeToClip(Rule):
    """Replace a Max or Min with a scalar by a Clip or Relu."""
    pattern = P("Max Min", Value("x"), Constant("bound"))

    def check(self, match: Match) -> bool:
        return (len(match.root.inputs) == 2 and match.constant("bound").size == 1 and _is_float(match)
                and match.shape(match.value("x")) == match.type.shape)

    def rewrite(self, match: Match, draft: Draft) -> None:
        bound = float(match.constant("bound").reshape(()))
        low, high = (bound, math.inf) if match.root.op == "Max" else (-math.inf, bound)
        _finish_clip(match, draft, match.value("x"), low, high)


class MergeClips(Rule):
    """Merge clips: Clip(Clip(x, a, b), c, d) = Clip(x, a', b') with a and b clipped to [c, d]."""
    pattern = P("Clip Relu", P("Clip Relu", Value("x"), bind="first"))

    def rewrite(self, match: Match, draft: Draft) -> None:
        low, high = bounds(match.root)
        first = (min(max(bound, low), high) for bound in bounds(match["first"]))
        _finish_clip(match, draft, match.value("x"), *first)


class SubtractConstant(Rule):
    pattern = P("Sub", Value("x"), Constant("c"))

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish("Add", [match.value("x"), draft.constant("minus", -match.constant("c"))])


class MergeSums(Rule):
    """Merge sums of constants: (x + c) + d = x + (c + d). A scalar d stays: it may be part of an activation (x + 3)."""
    pattern = P("Add", P("Add", Value("x"), Constant("c")), Constant("d"))

    def check(self, match: Match) -> bool:
        return match.constant("d").size > 1 and not match.graph.is_constant(match.value("x"))

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish("Add", [match.value("x"), draft.constant("sum", match.constant("c") + match.constant("d"))])


class DivideByConstant(Rule):
    pattern = P("Div", Value("x"), Constant("c"))

    def check(self, match: Match) -> bool:
        exact = match.root.attrs.get("exact", 0)
        return _is_float(match) and not exact and bool(np.all(np.isfinite(self._reciprocal(match))))

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish("Mul", [match.value("x"), draft.constant("reciprocal", self._reciprocal(match))])

    @staticmethod
    def _reciprocal(match: Match) -> Array:
        divisor = match.constant("c")
        with np.errstate(divide="ignore", over="ignore"):
            return (1 / divisor.astype(np.float64)).astype(divisor.dtype)


class OneByNumber(Rule):
    pattern = P("Div", Constant("one"), Value("x"))

    def check(self, match: Match) -> bool:
        same_shape = match.shape(match.value("x")) == match.type.shape
        return _is_float(match) and bool(np.all(match.constant("one") == 1)) and same_shape

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish("Reciprocal", [match.value("x")])


class SmallPower(Rule):
    pattern = P("Pow", Value("x"), Constant("exponent"))

    def check(self, match: Match) -> bool:
        exponent = match.constant("exponent")
        return _is_float(match) and exponent.size == 1 and float(exponent.reshape(())) in (2, 3, 0.5)

    def rewrite(self, match: Match, draft: Draft) -> None:
        x, exponent = match.value("x"), float(match.constant("exponent").reshape(()))
        if exponent == 0.5:
            draft.finish("Sqrt", [x])
        elif exponent == 2:
            draft.finish("Mul", [x, x])
        else:
            draft.finish("Mul", [x, draft.node("Mul", [x, x])])


_SIX = P("Clip", P("Add", Value("x"), Constant("three")), bind="clip")      # Clip(x + 3, 0, 6)


def _is_six(match: Match) -> bool:
    return _near(match, "three", 3) and bounds(match["clip"]) == (0.0, 6.0) and _near(match, "sixth", 1 / 6)


class ClipToHardSigmoid(Rule):
    pattern = P("Mul", _SIX, Constant("sixth"))

    def check(self, match: Match) -> bool:
        return _is_six(match)

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish("HardSigmoid", [match.value("x")], {"alpha": 1 / 6, "beta": 0.5})


class _Named(Rule):
    """Base of rules that replace arithmetic on x by one operator."""
    op: str

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish(self.op, [match.value("x")])


class HardSwish(_Named):
    op = "HardSwish"
    pattern = P("Mul", Value("x"), P("HardSigmoid", Value("x"), bind="gate"))

    def check(self, match: Match) -> bool:
        attrs = match["gate"].attrs
        return math.isclose(attrs.get("alpha", 0.2), 1 / 6, rel_tol=1e-4) and attrs.get("beta", 0.5) == 0.5


class HardSwishByClip(_Named):
    """Recognise (x * Clip(x + 3, 0, 6)) / 6."""
    op = "HardSwish"
    pattern = P("Mul", P("Mul", Value("x"), _SIX), Constant("sixth"))

    def check(self, match: Match) -> bool:
        return _is_six(match)


class HardSwishByScaledInput(HardSwishByClip):
    """Recognise (x / 6) * Clip(x + 3, 0, 6)."""
    pattern = P("Mul", P("Mul", Value("x"), Constant("sixth")), _SIX)


class Swish(_Named):
    op = "Swish"
    pattern = P("Mul", Value("x"), P("Sigmoid", Value("x")))


class Mish(_Named):
    op = "Mish"
    pattern = P("Mul", Value("x"), P("Tanh", P("Softplus", Value("x"))))


_ERF = P("Add", P("Erf", P("Mul", Value("x"), Constant("root"))), Constant("one"))      # 1 + Erf(x / sqrt 2)


class Gelu(_Named):
    """Recognise (x * (1 + Erf(x / sqrt 2))) * 1/2."""
    op = "Gelu"
    pattern = P("Mul", P("Mul", Value("x"), _ERF), Constant("half"))

    def check(self, match: Match) -> bool:
        return _near(match, "root", math.sqrt(0.5)) and _near(match, "one", 1) and _near(match, "half", 0.5)


class GeluHalfFirst(Gelu):
    """Recognise (x * 1/2) * (1 + Erf(x / sqrt 2))."""
    pattern = P("Mul", P("Mul", Value("x"), Constant("half")), _ERF)


class GeluHalfInside(Gelu):
    """Recognise x * ((1 + Erf(x / sqrt 2)) * 1/2)."""
    pattern = P("Mul", Value("x"), P("Mul", _ERF, Constant("half")))


def _is_float(match: Match) -> bool:
    return bool(match.type.dtype.kind == "f")


CANONICAL = (ClipToRelu(), ExtremeToClip(), MergeClips(), SubtractConstant(), MergeSums(), DivideByConstant(),
             OneByNumber(), SmallPower())
NAMED = (ClipToHardSigmoid(), HardSwish(), HardSwishByClip(), HardSwishByScaledInput(), Swish(), Mish(),
         Gelu(), GeluHalfFirst(), GeluHalfInside())
