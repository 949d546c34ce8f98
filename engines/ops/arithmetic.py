"""Arithmetic and elementary functions, element by element."""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from engines.ir import Array, Node
from engines.ops.pointwise import Pointwise


class Add(Pointwise):
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return a + b


class Sub(Pointwise):
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return a - b


class Mul(Pointwise):
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return a * b


class Div(Pointwise):
    """Integers truncate toward zero, as in C."""
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        if a.dtype == object:
            return np.asarray(np.frompyfunc(_symbolic_quotient, 2, 1)(a, b))
        if a.dtype.kind not in "iu":
            return a / b
        quotient = a // b
        return np.asarray(quotient + ((quotient * b != a) & ((a < 0) != (b < 0))))


def _symbolic_quotient(a: Any, b: Any) -> Any:
    return a / b if isinstance(a, float) or isinstance(b, float) else a // b


class Mod(Pointwise):
    """The sign follows the divisor (Python), or with fmod=1 the dividend (C)."""
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array, fmod: int = 0) -> Array:
        return np.fmod(a, b) if fmod else np.mod(a, b)


class Pow(Pointwise):
    @staticmethod
    def formula(base: Array, exponent: Array) -> Array:
        return np.power(base, exponent)


class Max(Pointwise):
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return np.maximum(a, b)


class Min(Pointwise):
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return np.minimum(a, b)


class Abs(Pointwise):
    @staticmethod
    def formula(x: Array) -> Array:
        return np.abs(x)


class Neg(Pointwise):
    symbolic = True

    @staticmethod
    def formula(x: Array) -> Array:
        return -x


class Sign(Pointwise):
    @staticmethod
    def formula(x: Array) -> Array:
        return np.sign(x)


class Floor(Pointwise):
    symbolic = True

    @staticmethod
    def formula(x: Array) -> Array:
        return np.floor(x)


class Ceil(Pointwise):
    symbolic = True

    @staticmethod
    def formula(x: Array) -> Array:
        return np.ceil(x)


class Round(Pointwise):
    """Halves go to the even neighbour."""

    @staticmethod
    def formula(x: Array) -> Array:
        return np.rint(x)


class Sqrt(Pointwise):
    @staticmethod
    def formula(x: Array) -> Array:
        return np.sqrt(x)


class Reciprocal(Pointwise):
    @staticmethod
    def formula(x: Array) -> Array:
        return 1 / x


class Exp(Pointwise):
    @staticmethod
    def formula(x: Array) -> Array:
        return np.exp(x)


class Log(Pointwise):
    @staticmethod
    def formula(x: Array) -> Array:
        return np.log(x)


class Erf(Pointwise):
    @staticmethod
    def formula(x: Array) -> Array:
        return erf(x)


def erf(x: Array) -> Array:
    """The error function, correctly rounded from double precision; NumPy has none."""
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x)).astype(x.dtype)


def _define_from_numpy(**functions: np.ufunc) -> None:
    """Operators that are a NumPy function under another name."""
    for name, function in functions.items():
        type(name, (Pointwise,), {"formula": staticmethod(function), "__module__": __name__})


_define_from_numpy(Sin=np.sin, Cos=np.cos, Tan=np.tan, Asin=np.arcsin, Acos=np.arccos, Atan=np.arctan,
                   Sinh=np.sinh, Cosh=np.cosh, Asinh=np.arcsinh, Acosh=np.arccosh, Atanh=np.arctanh,
                   BitwiseAnd=np.bitwise_and, BitwiseOr=np.bitwise_or, BitwiseXor=np.bitwise_xor,
                   BitwiseNot=np.bitwise_not)


class Cast(Pointwise):
    """To the dtype that `to` names, as NumPy names it."""
    symbolic = True

    @classmethod
    def result_dtype(cls, node: Node, dtypes: list[np.dtype[Any]]) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(node.attrs["to"])
        return dtype

    @staticmethod
    def formula(x: Array, to: str) -> Array:
        kind = np.dtype(to)
        if x.dtype == object:
            return np.asarray(np.frompyfunc(lambda v: _symbolic_cast(v, kind), 1, 1)(x), object)
        return x.astype(kind)


def _symbolic_cast(value: Any, kind: np.dtype[Any]) -> Any:
    """Extents are integers in every dtype; numbers become Python's, so that a later division knows its kind."""
    if not isinstance(value, int | float):
        return value
    return float(value) if kind.kind == "f" else int(value)
