"""Sums of products of integers, and what quantises a factor of theirs by its own range, found as it runs.

Graphs have these only until simplify has written them out (passes/dynamic_quantization.py); where it cannot, they run
as they are here.
"""
from __future__ import annotations

import numpy as np

from engines.errors import GraphError
from engines.ir.graph import Array, Node, TensorType
from engines.ops.convolution import Conv
from engines.ops.items import ItemAxes, Mixed
from engines.ops.linear import MatMul
from engines.ops.op import Inputs, LayoutOp, Op, Types

_BYTE, _SUM = np.dtype(np.uint8), np.dtype(np.int32)


class DynamicQuantizeLinear(Op):
    """uint8 over [min(x, 0), max(x, 0)], its scale and its zero point; for zeros alone the scale is 1."""

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        return TensorType(_BYTE, x.shape), TensorType(x.dtype, ()), TensorType(_BYTE, ())

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        raise Mixed("it quantises by the range of all items")

    @classmethod
    def compute(cls, node: Node, x: Array) -> tuple[Array, ...]:
        low, high = np.minimum(x.min(), 0), np.maximum(x.max(), 0)
        scale = np.asarray((high - low) / x.dtype.type(255) if high > low else 1, x.dtype)
        zero = np.clip(np.rint(-low / scale), 0, 255)
        return np.clip(np.rint(x / scale) + zero, 0, 255).astype(_BYTE), scale, zero.astype(_BYTE)


class MatMulInteger(Op):
    """(a - a's zero point) (b - b's zero point) in int32; a zero point may be one for each row of a, or column of b."""

    @classmethod
    def types(cls, node: Node, a: TensorType, b: TensorType, a_zero: TensorType | None = None,
              b_zero: TensorType | None = None) -> Types:
        (made,) = MatMul.types(node, a, b)
        return (TensorType(_SUM, made.shape),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        if any(axis is not None for axis in axes[2:]):
            raise Mixed("its zero points are those of items")
        return MatMul.item_axes(node, inputs[:2], outputs, axes[:2])

    @classmethod
    def compute(cls, node: Node, a: Array, b: Array, a_zero: Array | None = None, b_zero: Array | None = None) -> Array:
        a, b = a.astype(np.int32), b.astype(np.int32)
        if a_zero is not None:
            a = a - (a_zero.astype(np.int32)[..., None] if a_zero.ndim else a_zero.astype(np.int32))
        return np.asarray(np.matmul(a, b if b_zero is None else b - b_zero.astype(np.int32)))


class ConvInteger(LayoutOp):
    """Conv of x - its zero point and w - its zero point, one or one for each output channel, in int32."""

    @classmethod
    def types(cls, node: Node, x: TensorType, w: TensorType, x_zero: TensorType | None = None,
              w_zero: TensorType | None = None) -> Types:
        if x_zero is not None and x_zero.shape not in ((), (1,)):
            raise GraphError("the input has several zero points")
        (made,) = Conv.types(node, x, w)
        return (TensorType(_SUM, made.shape),)

    @classmethod
    def compute(cls, node: Node, x: Array, w: Array, x_zero: Array | None = None, w_zero: Array | None = None) -> Array:
        x, w = x.astype(np.int32), w.astype(np.int32)
        if w_zero is not None:
            w = w - w_zero.astype(np.int32).reshape(-1, *[1] * (w.ndim - 1))
        return Conv.compute(node, x if x_zero is None else x - x_zero.astype(np.int32).reshape(()), w)
