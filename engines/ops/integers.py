"""Integer products, and dynamic quantisation of their factors.

The simplifier decomposes most of these (passes/dynamic_quantization.py); the others run as they are.
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ops.convolution import Conv
from infer_server.engines.ops.items import ItemAxes, Mixed
from infer_server.engines.ops.linear import MatMul
from infer_server.engines.ops.op import Inputs, LayoutOp, Op, Types

_BYTE, _SUM = np.dtype(np.uint8), np.dtype(np.int32)


class DynamicQuantizeLinear(Op):
    """Quantisation to uint8 over [min(x, 0), max(x, 0)]; scale and zero point are outputs.

    The scale is 1 if all elements are 0.
    """

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
    """Product (a - a_zero) (b - b_zero) in int32; zero points are scalars, or per row of a and column of b."""

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
    """Convolution of x - x_zero and w - w_zero in int32; w's zero point may be per output channel."""

    @classmethod
    def types(cls, node: Node, x: TensorType, w: TensorType, x_zero: TensorType | None = None,
              w_zero: TensorType | None = None) -> Types:
        if x_zero is not None and x_zero.shape not in ((), (1,)):
            raise GraphError("the input's zero point must be a single number")
        (made,) = Conv.types(node, x, w)
        return (TensorType(_SUM, made.shape),)

    @classmethod
    def compute(cls, node: Node, x: Array, w: Array, x_zero: Array | None = None, w_zero: Array | None = None) -> Array:
        x, w = x.astype(np.int32), w.astype(np.int32)
        if w_zero is not None:
            w = w - w_zero.astype(np.int32).reshape(-1, *[1] * (w.ndim - 1))
        return Conv.compute(node, x if x_zero is None else x - x_zero.astype(np.int32).reshape(()), w)
