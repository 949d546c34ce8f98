"""Comparisons, and what is made of their answers."""
from __future__ import annotations

from typing import Any

import numpy as np

from engines.ir import Array, Node
from engines.ops.pointwise import Pointwise, Predicate


class Equal(Predicate):
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return np.equal(a, b)


class Less(Predicate):
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return np.less(a, b)


class LessOrEqual(Predicate):
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return np.less_equal(a, b)


class Greater(Predicate):
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return np.greater(a, b)


class GreaterOrEqual(Predicate):
    symbolic = True

    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return np.greater_equal(a, b)


class And(Predicate):
    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return np.logical_and(a, b)


class Or(Predicate):
    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return np.logical_or(a, b)


class Xor(Predicate):
    @staticmethod
    def formula(a: Array, b: Array) -> Array:
        return np.logical_xor(a, b)


class Not(Predicate):
    @staticmethod
    def formula(x: Array) -> Array:
        return np.logical_not(x)


class IsNaN(Predicate):
    @staticmethod
    def formula(x: Array) -> Array:
        return np.isnan(x)


class IsInf(Predicate):
    @staticmethod
    def formula(x: Array, detect_negative: int = 1, detect_positive: int = 1) -> Array:
        return np.isinf(x) & (((x > 0) & bool(detect_positive)) | ((x < 0) & bool(detect_negative)))


class Where(Pointwise):
    symbolic = True

    @classmethod
    def result_dtype(cls, node: Node, dtypes: list[np.dtype[Any]]) -> np.dtype[Any]:
        return dtypes[1]

    @staticmethod
    def formula(condition: Array, a: Array, b: Array) -> Array:
        return np.where(condition.astype(bool), a, b)
