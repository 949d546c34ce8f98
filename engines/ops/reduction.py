"""Reductions over `axes` (non-negative, sorted), and other operators along an axis: ArgMax, TopK, cumulative sums."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from infer_server.engines.ir.graph import Array, Dim, Node, TensorType
from infer_server.engines.ir.shapes import fixed, normal_axis
from infer_server.engines.ops.op import Op, SameShape, Types

Formula = Callable[..., Array]


class Reduction(Op, abstract=True):
    """Reduction by a formula (x, axis=, keepdims=)."""
    along, reduces = "axes", True
    formula: ClassVar[Formula]          # (x, axis=, keepdims=)

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        axes = cls.axes(node, len(x.shape))
        return (TensorType(x.dtype, reduced(x.shape, axes, node.attrs.get("keepdims", 1))),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        y = cls.formula(x, axis=cls.axes(node, x.ndim), keepdims=bool(node.attrs.get("keepdims", 1)))
        return np.asarray(y, x.dtype)


def ends(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the least and the greatest value of a dtype."""
    if dtype.kind == "b":
        return False, True
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return dtype.type(-np.inf), dtype.type(np.inf)


def reduced(shape: tuple[Dim, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[Dim, ...]:
    return tuple(1 if i in axes else d for i, d in enumerate(shape) if keepdims or i not in axes)


def mean(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    """Return the mean, 0 for no elements as in ONNX Runtime; ONNX leaves it undefined."""
    return np.asarray((np.mean if x.size else np.sum)(x, axis, keepdims=keepdims))


_FORMULAS: dict[str, Callable[..., Any]] = {
    "ReduceSum": np.sum,
    "ReduceMean": mean,
    "ReduceMax": lambda x, **over: np.max(x, **over, initial=ends(x.dtype)[0]),     # if empty: the least value
    "ReduceMin": lambda x, **over: np.min(x, **over, initial=ends(x.dtype)[1]),     # if empty: the greatest value
    "ReduceL1": lambda x, **over: np.abs(x).sum(**over),
    "ReduceL2": lambda x, **over: np.sqrt(np.square(x).sum(**over)),
    "ReduceSumSquare": lambda x, **over: np.square(x).sum(**over),
    "ReduceLogSum": lambda x, **over: np.log(x.sum(**over)),
    "ReduceLogSumExp": np.logaddexp.reduce,
}
for _name, _formula in _FORMULAS.items():
    type(_name, (Reduction,), {"formula": staticmethod(_formula)})


class ReduceProd(Reduction):
    """Product over `axes`."""
    symbolic = True
    formula: ClassVar[Formula] = staticmethod(np.prod)      # type: ignore[assignment]


class _Arg(Op, abstract=True):
    """Index of the extreme; among equals the first or, with select_last_index, the last."""
    along, reduces = "axis", True
    search: ClassVar[Formula]

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        axes = cls.axes(node, len(x.shape))
        return (TensorType(np.dtype(np.int64), reduced(x.shape, axes, node.attrs.get("keepdims", 1))),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        axis = node.attrs["axis"]
        last = bool(node.attrs.get("select_last_index"))
        found = cls.search(np.flip(x, axis) if last else x, axis=axis, keepdims=bool(node.attrs.get("keepdims", 1)))
        return np.asarray(x.shape[axis] - 1 - found if last else found, np.int64)


class ArgMax(_Arg):
    """Index of the maximum along `axis`."""
    search: ClassVar[Formula] = staticmethod(np.argmax)      # type: ignore[assignment]


class ArgMin(_Arg):
    """Index of the minimum along `axis`."""
    search: ClassVar[Formula] = staticmethod(np.argmin)      # type: ignore[assignment]


class TopK(Op):
    """The k (an attribute) largest or smallest elements along `axis` in order, and their indices.

    Ties are ordered by index.
    """
    along = "axis"

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        axis = normal_axis(node.attrs.get("axis", -1), len(x.shape))
        fixed(x.shape[axis:axis + 1])
        shape = (*x.shape[:axis], node.attrs["k"], *x.shape[axis + 1:])
        return TensorType(x.dtype, shape), TensorType(np.dtype(np.int64), shape)

    @classmethod
    def compute(cls, node: Node, x: Array) -> tuple[Array, ...]:
        axis = normal_axis(node.attrs.get("axis", -1), x.ndim)
        if node.attrs.get("largest", 1):        # ascending order of the reversed axis, reversed: stable ties
            order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
        else:
            order = np.argsort(x, axis, kind="stable")
        index = np.take(order, range(node.attrs["k"]), axis).astype(np.int64)
        return np.take_along_axis(x, index, axis), index


class _Cumulative(SameShape, abstract=True):
    """Cumulative operator. `exclusive`: without x[i]; `reverse`: from the end."""
    along = "axis"
    nothing: ClassVar[int]
    accumulate: ClassVar[Formula]

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        axis = node.attrs["axis"]
        if node.attrs.get("reverse", 0):
            x = np.flip(x, axis)
        y = cls.accumulate(x, axis, x.dtype)
        if node.attrs.get("exclusive", 0):
            y = np.roll(y, 1, axis)
            np.moveaxis(y, axis, 0)[:1] = cls.nothing
        return np.ascontiguousarray(np.flip(y, axis) if node.attrs.get("reverse", 0) else y)


class CumSum(_Cumulative):
    """Cumulative sum y[i] = x[0] + ... + x[i] along `axis`."""
    nothing, accumulate = 0, staticmethod(np.cumsum)


class CumProd(_Cumulative):
    """Cumulative product y[i] = x[0] * ... * x[i] along `axis`."""
    nothing, accumulate = 1, staticmethod(np.cumprod)
