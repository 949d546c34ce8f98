"""Matrix product with 4-bit weights that have a scale and an offset per block of the inner axis.

    w[n, k] = scales[n, b] * q[n, k] + offsets[n, b]        b = k // block, q integers in 0..15
    x[m, k] = scale[m, b] * r[m, k]                         if the model allows rounding of rows: r in -127..127

Graphs contain these operators after types are chosen (passes/quantization/weights.py). Before that the weights are
float constants, and FakeQuantizeBlocks marks the rows to be rounded.
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.dtypes import FLOAT
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.rounding import HEAD, from_bytes, real_rows, rounded
from infer_server.engines.ir.shapes import fixed
from infer_server.engines.ops.items import ItemAxes, only_first, untouched_axis
from infer_server.engines.ops.op import Inputs, Op, Types

CENTRE = 8              # the value of q that means 0 without offsets


class FakeQuantizeBlocks(Op):
    """Quantisation and dequantisation of each block of the last axis, as by QuantizeBlocks."""
    attributes = ("block",)

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        return (x,)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return (untouched_axis(outputs[0].shape, only_first(axes), (-1,), "rounds blocks along"),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        scales, numbers = rounded(x, node.attrs["block"])
        return real_rows(scales, numbers)[..., :x.shape[-1]].astype(x.dtype)


class QuantizeBlocks(FakeQuantizeBlocks):
    """Quantisation of each block of the last axis to bytes: a HEAD, then an integer per number, zero-padded."""

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        (depth,), block = fixed(x.shape[-1:]), node.attrs["block"]
        return (TensorType(np.dtype(np.int8), (*x.shape[:-1], -(-depth // block) * (HEAD + block))),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        scales, numbers = rounded(x, node.attrs["block"])
        sums = numbers.sum(-1, dtype=np.int32, keepdims=True)
        parts = [scales[..., None].view(np.int8), sums.view(np.int8), numbers]
        return np.concatenate(parts, -1).reshape(*x.shape[:-1], -1)


class MatMulBlocks(Op):
    """Blocked matrix product of x, or of QuantizeBlocks' result.

    Inputs: x, q (two per byte, lower bits first), scales, offsets or "", bias or "". `depth` is the inner extent.
    """
    attributes = ("block", "depth")

    @classmethod
    def types(cls, node: Node, x: TensorType, q: TensorType, *_: TensorType | None) -> Types:
        return (TensorType(FLOAT if x.dtype == np.int8 else x.dtype, (*x.shape[:-1], q.shape[0])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return (only_first(axes),)

    @classmethod
    def compute(cls, node: Node, x: Array, q: Array, scales: Array, offsets: Array | None = None,
                bias: Array | None = None) -> Array:
        block, depth = node.attrs["block"], node.attrs["depth"]
        weights = in_blocks(unpacked(q, depth), scales, offsets, block)
        x = from_bytes(x, block)[..., :depth] if x.dtype == np.int8 else x
        y = np.matmul(x, weights.T)
        return np.asarray(y if bias is None else y + bias)


def packed(q: Array) -> Array:
    """Pack uint8 [rows, columns] in 0..15, two per byte."""
    even = np.pad(q, ((0, 0), (0, q.shape[1] % 2)))
    return np.asarray(even[:, ::2] | even[:, 1::2] << 4, np.uint8)


def unpacked(q: Array, depth: int) -> Array:
    return np.stack([q & 15, q >> 4], -1).reshape(len(q), -1)[:, :depth]


def in_blocks(q: Array, scales: Array, offsets: Array | None, block: int) -> Array:
    """Return the float32 weights."""
    offsets = -CENTRE * scales if offsets is None else offsets
    scale, offset = (np.repeat(array.astype(np.float64), block, 1)[:, :q.shape[1]] for array in (scales, offsets))
    return np.asarray(q * scale + offset, np.float32)
