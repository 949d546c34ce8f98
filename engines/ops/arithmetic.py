"""Elementwise arithmetic and elementary functions."""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.ops.pointwise import Epilogue, Pointwise, define

define(Epilogue, symbolic=True, commutative=True, Add=np.add, Mul=np.multiply, Max=np.maximum, Min=np.minimum)
define(Epilogue, symbolic=True, Sub=np.subtract, Neg=np.negative, Floor=np.floor, Ceil=np.ceil)
define(Epilogue, Abs=np.absolute, Sqrt=np.sqrt, Exp=np.exp, Log=np.log, Sin=np.sin, Cos=np.cos, Asin=np.arcsin,
       Acos=np.arccos, Atan=np.arctan, Round=np.rint)       # halves to even
define(Pointwise, Sign=np.sign, Tan=np.tan, Sinh=np.sinh, Cosh=np.cosh, Asinh=np.arcsinh,
       Acosh=np.arccosh, Atanh=np.arctanh, BitwiseNot=np.bitwise_not)


def power(x: Array, y: Array) -> Array:
    """Return x**y; integer results are truncated, including those of negative exponents, which NumPy rejects."""
    if x.dtype.kind not in "iu" or y.dtype.kind not in "iu":
        return np.asarray(np.power(x, y))
    whole = np.power(x, np.maximum(y, 0))
    return np.where(y < 0, np.where(np.abs(x) == 1, np.power(x, y & 1), 0), whole)


define(Pointwise, Pow=power)
define(Pointwise, BitShift=lambda a, b, direction="LEFT": np.left_shift(a, b) if direction == "LEFT" else
       np.right_shift(a, b))
define(Pointwise, commutative=True, BitwiseAnd=np.bitwise_and, BitwiseOr=np.bitwise_or, BitwiseXor=np.bitwise_xor)


class Div(Epilogue):
    """Division. Integers truncate toward zero, as in C.

    Floats divided by a constant are multiplied by its reciprocal unless `exact` is set.
    """
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array, exact: int = 0) -> Array:
        if a.dtype == object:
            return np.asarray(np.frompyfunc(_symbolic_quotient, 2, 1)(a, b))
        if a.dtype.kind not in "iu":
            return a / b
        quotient = a // b
        return np.asarray(quotient + ((quotient * b != a) & ((a < 0) != (b < 0))))


def _symbolic_quotient(a: Any, b: Any) -> Any:
    if type(a) is SymbolicInt or type(b) is SymbolicInt:  # the sign is known; truncate
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return a / b if isinstance(a, float) or isinstance(b, float) else a // b


# The sign follows the divisor (Python), or with fmod=1 the dividend (C).
define(Pointwise, symbolic=True, Mod=lambda a, b, fmod=0: np.fmod(a, b) if fmod else np.mod(a, b))


def erf(x: Array) -> Array:
    """Return the error function, computed in double precision; NumPy has none."""
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x)).astype(x.dtype)


define(Epilogue, Erf=erf, Reciprocal=lambda x: 1 / x)
