"""Arithmetic and elementary functions, element by element."""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from engines.ir.graph import Array, Node
from engines.ops.op import Stored
from engines.ops.pointwise import Epilogue, Pointwise, define

define(Epilogue, symbolic=True, commutative=True, Add=np.add, Mul=np.multiply, Max=np.maximum, Min=np.minimum)
define(Epilogue, symbolic=True, Sub=np.subtract, Neg=np.negative, Floor=np.floor, Ceil=np.ceil)
define(Epilogue, Abs=np.absolute, Sqrt=np.sqrt, Exp=np.exp, Log=np.log, Sin=np.sin, Cos=np.cos,
       Round=np.rint)       # halves go to the even neighbour
define(Pointwise, Sign=np.sign, Pow=np.power, Tan=np.tan, Asin=np.arcsin, Acos=np.arccos, Atan=np.arctan,
       Sinh=np.sinh, Cosh=np.cosh, Asinh=np.arcsinh, Acosh=np.arccosh, Atanh=np.arctanh, BitwiseNot=np.bitwise_not)
define(Pointwise, commutative=True, BitwiseAnd=np.bitwise_and, BitwiseOr=np.bitwise_or, BitwiseXor=np.bitwise_xor)


class Div(Epilogue):
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


# The sign follows the divisor (Python), or with fmod=1 the dividend (C).
define(Pointwise, symbolic=True, Mod=lambda a, b, fmod=0: np.fmod(a, b) if fmod else np.mod(a, b))


def erf(x: Array) -> Array:
    """The error function, correctly rounded from double precision; NumPy has none."""
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x)).astype(x.dtype)


define(Epilogue, Erf=erf, Reciprocal=lambda x: 1 / x)


class Cast(Pointwise):
    """To the dtype that `to` names, as NumPy names it."""
    symbolic = True
    stored = Stored.CONVERTED       # between floats; other dtypes are stored as they are

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
