"""Comparisons and logical operators."""
from __future__ import annotations

from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.ops.pointwise import Pointwise, Predicate, define

define(Predicate, symbolic=True, commutative=True, Equal=np.equal)
define(Predicate, symbolic=True, Less=np.less, LessOrEqual=np.less_equal, Greater=np.greater,
       GreaterOrEqual=np.greater_equal)
define(Predicate, commutative=True, And=np.logical_and, Or=np.logical_or, Xor=np.logical_xor)
define(Predicate, Not=np.logical_not, IsNaN=np.isnan)


class IsInf(Predicate):
    """Test for infinities, of one sign or both."""

    @staticmethod
    def formula(x: Array, detect_negative: int = 1, detect_positive: int = 1) -> Array:
        return np.isinf(x) & (((x > 0) & bool(detect_positive)) | ((x < 0) & bool(detect_negative)))


class Where(Pointwise):
    """Selection of a where the condition is true, else b."""
    symbolic = True

    @classmethod
    def result_dtype(cls, node: Node, dtypes: list[np.dtype[Any]]) -> np.dtype[Any]:
        return dtypes[1]

    @staticmethod
    def formula(condition: Array, a: Array, b: Array) -> Array:
        return np.where(condition.astype(bool), a, b)
