"""ONNX pointwise operators as epilogue instructions, one line per operator.

A writer takes the AffineWriter, the node and its arguments as Affine values, and returns the result. A new pointwise
operator is a line here and, for a new function, an instruction in program.py.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from infer_server.engines.ir.dtypes import NARROW
from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.epilogue.affine import Affine, AffineWriter

Writer = Callable[..., Affine]
MOST_FACTORS = 16       # largest power that is computed by multiplication
LEAST_DIVISOR = float(np.finfo(np.float32).tiny)        # smallest number with a finite reciprocal


def _divide(w: AffineWriter, node: Node, a: Affine, b: Affine) -> Affine:
    """Multiply by the reciprocal of a constant if it is finite, else divide."""
    if b.constant and not node.attrs.get("exact") and np.all(np.abs(b.offset) >= LEAST_DIVISOR):
        return a.scaled(1.0 / b.offset)
    return w.apply("div", a, b)


def _clip(w: AffineWriter, node: Node, x: Affine) -> Affine:
    low, high = node.attrs.get("min"), node.attrs.get("max")
    saturates = bool(node.attrs.get("saturates", 0))
    return x.clip(-np.inf if low is None else low, np.inf if high is None else high, saturates)


def _prelu(w: AffineWriter, node: Node, x: Affine, slope: Affine) -> Affine:
    x = w.settled(x)
    if slope.constant and np.all((slope.offset >= 0) & (slope.offset <= 1)):     # PReLU is the maximum of two lines
        return w.apply("max", x, x.scaled(slope.offset))
    return w.apply("where_positive", x, x, w.multiply(x, slope))


def _hard_sigmoid(w: AffineWriter, node: Node, x: Affine) -> Affine:
    return x.scaled(node.attrs.get("alpha", 0.2), node.attrs.get("beta", 0.5)).clip(0, 1)


def _hard_swish(w: AffineWriter, node: Node, x: Affine) -> Affine:
    x = x if x.one_fma else w.settled(x)
    return w.multiply(x, x.scaled(1 / 6, 0.5).clip(0, 1))


def _swish(w: AffineWriter, node: Node, x: Affine) -> Affine:
    if w.approximate:
        return w.apply("silu_u8", x)
    x = w.settled(x)
    return w.multiply(x, w.apply("sigmoid", x))


def _gelu(w: AffineWriter, node: Node, x: Affine) -> Affine:
    by_tanh = node.attrs.get("approximate") == "tanh"
    if w.approximate:
        return w.apply("gelu_tanh_u8" if by_tanh else "gelu_u8", x)
    if not by_tanh:
        return w.apply("gelu", x)
    x = w.settled(x)
    cubic = w.multiply(w.multiply(x, x), x)
    factor = math.sqrt(2 / math.pi)
    inner = w.apply("tanh", w.add(x.scaled(factor), cubic.scaled(0.044715 * factor)))
    return w.multiply(x, inner.scaled(0.5, 0.5))


def _softplus(w: AffineWriter, x: Affine) -> Affine:
    """Write log(1 + e**x) as max(x, 0) + log(1 + e**-|x|)."""
    x = w.settled(x)
    small = w.apply("log1p", w.apply("exp_down_to_0", w.apply("abs", x).scaled(-1)))
    return w.add(w.settled(x.clip(0, np.inf)), small)


def _elu(w: AffineWriter, x: Affine, alpha: float, gamma: float = 1.0) -> Affine:
    x = w.settled(x)
    negative = w.apply("exp_of_negative", x.clip(-np.inf, 0)).scaled(alpha * gamma, -alpha * gamma)
    return w.apply("where_positive", x, x.scaled(gamma), negative)


def _pow(w: AffineWriter, node: Node, x: Affine, exponent: Affine) -> Affine:
    """Return x**p: products for integral p, else e**(p log x) with relative error below 1e-7 (4 + |p log x|)."""
    if x.constant and np.all(x.offset > 0):
        return w.apply("exp", exponent.scaled(np.log(x.offset)))
    if not exponent.constant or exponent.offset.size != 1:
        raise NotImplementedError("Pow with an exponent that is computed at run time, or one for each channel")
    x, power = w.settled(x), exponent.offset.item()
    if power == 0:
        return w.apply("max", Affine.number(1.0), Affine.number(1.0))
    if power == 0.5:
        return w.apply("sqrt", x)
    if abs(power) > MOST_FACTORS or power != round(power):
        return w.apply("exp", w.apply("log", x).scaled(power))
    result = x
    for bit in f"{abs(round(power)):b}"[1:]:
        result = w.multiply(result, result)
        result = w.multiply(result, x) if bit == "1" else w.settled(result)
    return result if power > 0 else w.apply("div", Affine.number(1.0), result)


def _extreme(op: str) -> Writer:
    def write(w: AffineWriter, node: Node, *arguments: Affine) -> Affine:
        result = arguments[0]
        for other in arguments[1:]:
            x, bound = (other, result) if result.constant else (result, other)
            if not bound.constant:
                result = w.apply(op if w.coarse else f"{op}_or_nan", x, bound)
            elif op == "max":
                result = x.clip(bound.offset, np.inf)
            else:
                result = x.clip(-np.inf, bound.offset)
        return result
    return write


def _fake_quantize(w: AffineWriter, node: Node, x: Affine) -> Affine:
    scale, zero_point, low, high = (node.attrs[key] for key in ("scale", "zero_point", "low", "high"))
    stored = w.apply("round", w.requantise(x, scale, zero_point, low, high)).clip(low, high, saturates=True)
    return stored.scaled(scale, -scale * zero_point)


def _cast(w: AffineWriter, node: Node, x: Affine) -> Affine:
    """Round to 16-bit floats, convert to 0 or 1 for bool, and pass other floats and rounded bytes through.

    Casts to other integers are in rules/pointwise.py.
    """
    to = node.attrs["to"]
    if to == "bool":
        return w.apply("equal", x, Affine.number(0.0)).scaled(-1, 1)
    return w.apply(to, x) if to in NARROW else x


def _unary(w: AffineWriter, node: Node, x: Affine) -> Affine:
    """Apply the instruction named like the operator."""
    return w.apply(node.op.lower(), x)


WRITERS: Mapping[str, Writer] = {
    "Identity": lambda w, node, x: x,
    "Add": lambda w, node, a, b: w.add(a, b),
    "Sub": lambda w, node, a, b: w.add(a, b.scaled(-1)),
    "Mul": lambda w, node, a, b: w.multiply(a, b),
    "Div": _divide,
    "Neg": lambda w, node, x: x.scaled(-1),
    "Max": _extreme("max"),
    "Min": _extreme("min"),
    "Clip": _clip,
    "Relu": lambda w, node, x: x.clip(0, np.inf),
    "LeakyRelu": lambda w, node, x: _prelu(w, node, x, Affine.number(node.attrs.get("alpha", 0.01))),
    "PRelu": _prelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    **dict.fromkeys(("Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Abs", "Erf", "Sin", "Cos", "Asin", "Acos", "Atan",
                     "Floor", "Ceil", "Round"), _unary),
    "Reciprocal": lambda w, node, x: w.apply("div", Affine.number(1.0), x),
    "Swish": _swish,
    "Gelu": _gelu,
    "Softplus": lambda w, node, x: _softplus(w, x),
    "Mish": lambda w, node, x: w.multiply(w.settled(x), w.apply("tanh", _softplus(w, x))),
    "Elu": lambda w, node, x: _elu(w, x, node.attrs.get("alpha", 1.0)),
    "Celu": lambda w, node, x: _elu(w, x.scaled(1 / node.attrs.get("alpha", 1.0)), 1.0, node.attrs.get("alpha", 1.0)),
    "Selu": lambda w, node, x: _elu(w, x, node.attrs.get("alpha", 1.67326319217681884765625),
                                    node.attrs.get("gamma", 1.05070102214813232421875)),
    "Pow": _pow,
    "Cast": _cast,
    "FakeQuantize": _fake_quantize,
    "Where": lambda w, node, condition, a, b: w.apply("where_positive", condition, a, b),
    # comparisons return 1 or 0
    "Equal": lambda w, node, a, b: w.apply("equal", a, b),
    "Less": lambda w, node, a, b: w.apply("less", a, b),
    "LessOrEqual": lambda w, node, a, b: w.apply("less_or_equal", a, b),
    "Greater": lambda w, node, a, b: w.apply("less", b, a),
    "GreaterOrEqual": lambda w, node, a, b: w.apply("less_or_equal", b, a),
}


def write_node(w: AffineWriter, node: Node, arguments: list[Any]) -> Affine:
    """Return the node's result. Raise NotImplementedError if there is no instruction for it."""
    writer = WRITERS.get(node.op)
    if writer is None:
        raise NotImplementedError(f"no instruction for {node.op}")
    return writer(w, node, *arguments)
