"""ONNX pointwise operators as operations of a nest, for all kinds of numbers that they support."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.nest import functions
from infer_server.engines.lowering.nest.program import FLOATING, KINDS, Term

Formula = Callable[..., Term]       # (node, *arguments) -> result


def write_node(node: Node, arguments: list[Term]) -> Term:
    """Return the node's result. Raise NotImplementedError if there is no operation for it."""
    formula = FORMULAS.get(node.op)
    if formula is None:
        raise NotImplementedError(f"no operation for {node.op}")
    return formula(node, *arguments)


def kind_of(dtype: str) -> str:
    """Return the kind that a dtype is computed in. Raise NotImplementedError if there is none."""
    kind = KINDS.get(dtype)
    if kind is None:
        raise NotImplementedError(f"no arithmetic on {dtype}")
    return kind


# ---- functions
def _function(name: str, fast: bool = False) -> Formula:
    """Return the formula of a function. fast: the epilogue's functions have it in float32."""
    double = getattr(functions, name, None)

    def write(node: Node, x: Term) -> Term:
        if x.kind == "f32" and fast:
            return x.unary(name)
        if double is None or x.kind not in FLOATING:
            raise NotImplementedError(f"no {node.op} of {x.kind}")
        result: Term = double(x.to("f64")).to(x.kind)
        return result
    return write


EXP, LOG, LOG1P, TANH, SIGMOID, ERF = (
    _function(name, fast=True) for name in ("exp", "log", "log1p", "tanh", "sigmoid", "erf"))


def _unary(op: str) -> Formula:
    """Return the formula of an operation that does not change integers, except neg and abs."""
    def write(node: Node, x: Term) -> Term:
        return x if x.kind not in FLOATING and op not in ("neg", "abs") else x.unary(op)
    return write


def _floats(formula: Callable[[Node, Term], Term]) -> Formula:
    def write(node: Node, x: Term) -> Term:
        if x.kind not in FLOATING:
            raise NotImplementedError(f"no {node.op} of {x.kind}")
        return formula(node, x)
    return write


def _pow(node: Node, x: Term, y: Term) -> Term:
    if x.kind not in FLOATING and y.kind not in FLOATING:
        return _integer_power(x, y.to(x.kind))
    result = functions.power(x.to("f64"), y.to("f64"))
    if x.kind not in FLOATING:      # round first: 5**2.0 may be 24.999999999999996
        whole = result.unary("rint")
        result = x.writer.where((result - whole).unary("abs") < whole.unary("abs") * 8e-15, whole, result)
    return result.to(x.kind)


def _integer_power(x: Term, y: Term) -> Term:
    """Raise integers to a power by repeated squaring.

    Six bits of the exponent suffice: beyond 63 only powers of 0, 1 and -1 do not overflow. Negative powers are
    truncated to 0, except those of 1 and -1.
    """
    result, square = x.like(1), x
    for bit in range(6):
        set_bit = y.binary("shr", bit).binary("and", 1).differs(0)
        result = x.writer.where(set_bit, result * square, result)
        square = square * square
    return x.writer.where((y < 0) & x.differs(1) & (x + 1).differs(0), 0, result)


def _modulo(node: Node, a: Term, b: Term) -> Term:
    fmod = bool(node.attrs.get("fmod"))
    if a.kind not in FLOATING:
        return a.binary("rem" if fmod else "mod", b)
    if a.kind == "f64":
        raise NotImplementedError("no exact Mod of f64")
    exact = functions.remainder if fmod else functions.modulo
    return exact(a.to("f64"), b.to("f64")).to(a.kind)


def _shift(node: Node, a: Term, b: Term) -> Term:
    return a.binary("shl" if node.attrs["direction"] == "LEFT" else "shr", b)


def _cast(node: Node, x: Term) -> Term:
    to = node.attrs["to"]
    kind = kind_of(to)
    if x.kind in FLOATING and to in ("int8", "uint8", "int16", "uint16"):
        return _low_bits(x)                 # NumPy truncates to the low bits
    if x.kind == "u64" and kind in ("i32", "i64") or x.kind in ("i32", "i64") and kind == "u64":
        return x.to("i64").to(kind) if x.kind != "u64" else x.bits("i64").to(kind)
    return x.to(kind)


def _low_bits(x: Term) -> Term:
    """Return an integer with at least the last 16 bits of x, 0 beyond 64 bits.

    A float32 is split by exact arithmetic, because few targets have vectors of 64-bit integers.
    """
    if x.kind != "f32":
        return x.to("i64").to("i32")
    size = x.unary("abs")
    low = (size - (size * 2.0 ** -16).unary("floor") * 2.0 ** 16).to("i32")
    return x.writer.where(x < 0.0, -low, low)


def _clip(node: Node, x: Term) -> Term:
    for key, op in (("min", "max"), ("max", "min")):
        bound = node.attrs.get(key)
        if bound is None or np.ndim(bound):
            if bound is not None:
                raise NotImplementedError("its bounds are per channel")
            continue
        if x.kind in FLOATING:
            x = _bounded(x, op, float(bound))
        elif math.isfinite(bound):
            x = _bounded(x, op, int(bound))
    return x


def _bounded(x: Term, op: str, bound: float) -> Term:
    """Apply max or min with a bound, in the order that keeps NaN."""
    return x.like(bound).binary(op, x)


def _is_infinite(node: Node, x: Term) -> Term:
    negative, positive = (bool(node.attrs.get(f"detect_{sign}", 1)) for sign in ("negative", "positive"))
    if negative and positive:
        return x.unary("abs").equals(math.inf)
    return x.equals(-math.inf if negative else math.inf) if negative or positive else x.differs(x) & x.equals(x)


def _sign(node: Node, x: Term) -> Term:
    zero, one = (0.0, 1.0) if x.kind in FLOATING else (0, 1)
    positive = x.writer.where(x > zero, x.like(one), zero)
    return x.writer.where(x < zero, -positive.like(one), x.writer.where(x.equals(x), positive, x))


def _where(x: Term, test: Term, a: Term | float, b: Term | float) -> Term:
    return x.writer.where(test, a if isinstance(a, Term) else x.like(a), b)


def _leaky(x: Term, slope: Term | float) -> Term:
    return _where(x, x < _zero(x), x * slope, x)


def _zero(x: Term) -> float:
    return 0.0 if x.kind in FLOATING else 0


def _elu(x: Term, node: Node, alpha: float, gamma: float = 1.0) -> Term:
    negative = (EXP(node, _bounded(x, "min", 0.0)) - 1.0) * (alpha * gamma)
    return _where(x, x > 0.0, x * gamma, negative)


def _softplus(node: Node, x: Term) -> Term:
    """Return log(1 + e**x) as max(x, 0) + log(1 + e**-|x|)."""
    return _bounded(x, "max", 0.0) + LOG1P(node, EXP(node, -x.unary("abs")))


def _gelu(node: Node, x: Term) -> Term:
    if node.attrs.get("approximate") == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (TANH(node, inner) + 1.0)
    return x * 0.5 * (ERF(node, x * math.sqrt(0.5)) + 1.0)


def _shrink(node: Node, x: Term) -> Term:
    bias, lambd = node.attrs.get("bias", 0.0), node.attrs.get("lambd", 0.5)
    return _where(x, x < -lambd, x + bias, _where(x, x > lambd, x - bias, 0.0))


def _step(x: Term) -> Term:
    """Clip to [0, 1]."""
    return _bounded(_bounded(x, "max", 0.0), "min", 1.0)


def _fake_quantize(node: Node, x: Term) -> Term:
    """Divide by the scale, as the reference does: multiplying by 1 / scale rounds some halves differently."""
    scale, zero_point, low, high = (node.attrs[key] for key in ("scale", "zero_point", "low", "high"))
    stored = (x / float(scale)).unary("rint") + float(zero_point)
    return (_bounded(_bounded(stored, "max", float(low)), "min", float(high)) - float(zero_point)) * float(scale)


def _extreme(op: str) -> Formula:
    def write(node: Node, first: Term, *others: Term) -> Term:
        for other in others:
            found = first.binary(op, other)     # `other` if `first` is NaN
            first = first.writer.where(first.equals(first), found, first) if first.kind in FLOATING else found
        return first
    return write


def _comparison(op: str, turned: bool = False) -> Formula:
    return lambda node, a, b: (b if turned else a).binary(op, a if turned else b, "i1")


def _binary(op: str) -> Formula:
    return lambda node, a, b: a.binary(op, b)


FORMULAS: Mapping[str, Formula] = {
    "Identity": lambda node, x: x,
    "Add": _binary("add"), "Sub": _binary("sub"), "Mul": _binary("mul"), "Div": _binary("div"),
    "Neg": _unary("neg"), "Abs": _unary("abs"), "Max": _extreme("max"), "Min": _extreme("min"),
    "Mod": _modulo, "Pow": _pow, "BitShift": _shift, "Cast": _cast, "Clip": _clip, "Sign": _sign,
    **{f"Bitwise{word}": _binary(word.lower()) for word in ("And", "Or", "Xor")},
    **{word: _binary(word.lower()) for word in ("And", "Or", "Xor")},
    "BitwiseNot": lambda node, x: ~x, "Not": lambda node, x: ~x,
    "Equal": _comparison("eq"), "Less": _comparison("lt"), "LessOrEqual": _comparison("le"),
    "Greater": _comparison("lt", turned=True), "GreaterOrEqual": _comparison("le", turned=True),
    "Where": lambda node, test, a, b: a.writer.where(test, a, b),
    "IsNaN": lambda node, x: x.differs(x), "IsInf": _is_infinite,
    "Floor": _unary("floor"), "Ceil": _unary("ceil"), "Round": _unary("rint"),
    "Sqrt": _floats(lambda node, x: x.unary("sqrt")), "Reciprocal": _floats(lambda node, x: x.like(1.0) / x),
    "Exp": EXP, "Log": LOG, "Tanh": TANH, "Sigmoid": SIGMOID, "Erf": ERF,
    **{name.capitalize(): _function(name, fast=True) for name in ("sin", "cos", "asin", "acos", "atan")},
    **{name.capitalize(): _function(name) for name in ("tan", "sinh", "cosh", "asinh", "acosh", "atanh")},
    "Relu": lambda node, x: _bounded(x, "max", _zero(x)),
    "LeakyRelu": lambda node, x: _leaky(x, node.attrs.get("alpha", 0.01)),
    "PRelu": lambda node, x, slope: _leaky(x, slope),
    "Elu": lambda node, x: _elu(x, node, node.attrs.get("alpha", 1.0)),
    "Celu": lambda node, x: _elu(x * (1 / node.attrs.get("alpha", 1.0)), node, 1.0, node.attrs.get("alpha", 1.0)),
    "Selu": lambda node, x: _elu(x, node, node.attrs.get("alpha", 1.67326319217681884765625),
                                 node.attrs.get("gamma", 1.05070102214813232421875)),
    "HardSigmoid": lambda node, x: _step(x * node.attrs.get("alpha", 0.2) + node.attrs.get("beta", 0.5)),
    "HardSwish": lambda node, x: x * _step(x * (1 / 6) + 0.5),
    "Swish": lambda node, x: x * SIGMOID(node, x),
    "Softplus": _softplus, "Mish": lambda node, x: x * TANH(node, _softplus(node, x)), "Gelu": _gelu,
    "Softsign": lambda node, x: x / (x.unary("abs") + 1.0),
    "ThresholdedRelu": lambda node, x: _where(x, x > node.attrs.get("alpha", 1.0), x, 0.0),
    "Shrink": _shrink, "FakeQuantize": _floats(_fake_quantize),
}
