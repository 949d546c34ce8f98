"""Pooling: reductions over windows or whole images, per channel."""
from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import fixed
from infer_server.engines.ops.items import ItemAxes, Mixed
from infer_server.engines.ops.op import Inputs, LayoutOp, Stored, Types
from infer_server.engines.ops.reduction import mean
from infer_server.engines.ops.window import Window


class _Pool(LayoutOp, abstract=True):
    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        sizes = fixed(x.shape[2:])
        outputs = Window.of(node, len(sizes)).outputs(sizes, bool(node.attrs.get("ceil_mode")))
        return (TensorType(x.dtype, (*x.shape[:2], *outputs)),)

    @classmethod
    def taps(cls, node: Node, x: Array, fill: float) -> Iterator[Array]:
        """Yield what all output pixels read at each tap of the window, with x padded by `fill`."""
        window = Window.of(node, x.ndim - 2)
        outputs = window.outputs(x.shape[2:], bool(node.attrs.get("ceil_mode")))
        return window.taps(window.padded(x, fill, outputs), outputs)


class MaxPool(_Pool):
    """Maximum of each window; padding never wins.

    With indices a window starts from its first pixel and takes larger ones, so it keeps a leading NaN, as in ONNX
    Runtime.
    """
    stored = Stored.ALIKE

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        (y,) = super().types(node, x)
        return y, TensorType(np.dtype(np.int64), y.shape)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        if len(node.outputs) > 1 and node.outputs[1]:
            raise Mixed("its second output numbers the pixels of all items")
        return super().item_axes(node, inputs, outputs, axes)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array | tuple[Array, ...]:
        if len(node.outputs) < 2 or not node.outputs[1]:
            return np.asarray(reduce(np.maximum, cls.taps(node, x, _lowest(x.dtype)))).copy()
        if node.attrs.get("channels_last"):
            raise GraphError("the second output (indices) is supported for channels-first images only")
        return _with_indices(node, x)


def _with_indices(node: Node, x: Array) -> tuple[Array, Array]:
    """Return the maxima and their indices in flattened x, the first among equals; storage_order 1 is column-major."""
    order = "F" if node.attrs.get("storage_order") else "C"
    image = np.arange(x[0, 0].size).reshape(x.shape[2:], order=order)       # type: ignore[call-overload]
    numbers = image + (np.arange(len(x) * x.shape[1]) * image.size).reshape(*x.shape[:2], *[1] * image.ndim)
    taps = [*zip(MaxPool.taps(node, x, _lowest(x.dtype)), MaxPool.taps(node, numbers, -1), strict=True)]
    y, found = taps[0]
    for tap, number in taps[1:]:
        beats = (number >= 0) & ((found < 0) | (tap > y))
        y, found = np.where(beats, tap, y), np.where(beats, number, found)
    return y.copy(), found.astype(np.int64)


def _lowest(dtype: np.dtype[Any]) -> float:
    return -np.inf if dtype.kind == "f" else int(np.iinfo(dtype).min)


class AveragePool(_Pool):
    """Mean of each window; padding counts as zeros with count_include_pad, else not at all."""
    anchor, stored = True, Stored.CONVERTED

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return np.asarray(sum(cls.taps(node, x, 0)) / cls.counts(node, x.shape[2:]).astype(x.dtype))

    @classmethod
    def counts(cls, node: Node, sizes: tuple[int, ...]) -> Array:
        """Return the divisor of each output pixel, an array of the output's spatial shape."""
        window = Window.of(node, len(sizes))
        outputs = window.outputs(sizes, bool(node.attrs.get("ceil_mode")))
        ones = np.ones((1, 1, *sizes), np.int64)
        if node.attrs.get("count_include_pad"):
            ones = np.pad(ones, [(0, 0), (0, 0), *window.pads], constant_values=1)
            window = Window(window.kernel, window.strides, window.dilations, ((0, 0),) * len(sizes))
        counts: Array = reduce(np.add, window.taps(window.padded(ones, 0, outputs), outputs))[0, 0]
        return counts


class LpPool(_Pool):
    """Lp norm of each window."""

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        p = node.attrs.get("p", 2)
        return np.asarray(sum(cls.taps(node, np.abs(x) ** p, 0)) ** (1 / p))


class _GlobalPool(LayoutOp, abstract=True):
    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        return (TensorType(x.dtype, (*x.shape[:2], *[1] * (len(x.shape) - 2))),)


class GlobalAveragePool(_GlobalPool):
    """Mean over all pixels."""
    anchor, stored = True, Stored.CONVERTED

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return mean(x, tuple(range(2, x.ndim)), keepdims=True)


class GlobalMaxPool(_GlobalPool):
    """Maximum over all pixels."""
    stored = Stored.ALIKE

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return np.asarray(x.max(axis=tuple(range(2, x.ndim)), keepdims=True))
