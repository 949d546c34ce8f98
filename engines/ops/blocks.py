"""A matrix product by weights of four bits, with a scale and an offset for each block of the inner axis.

    w[n, k] = scales[n, b] * q[n, k] + offsets[n, b]        b = k // block, q whole numbers from 0 to 15
    x[m, k] = scale[m, b] * r[m, k]                         if the model lets the rows be rounded: r from -127 to 127

Graphs have it once types are chosen (passes/quantization/weights.py); until then the weights are float constants, and
FakeQuantizeBlocks says which rows are rounded.
"""
from __future__ import annotations

import numpy as np

from engines.ir.dtypes import FLOAT
from engines.ir.graph import Array, Node, TensorType
from engines.ir.rounding import HEAD, from_bytes, real_rows, rounded
from engines.ir.shapes import fixed
from engines.ops.items import ItemAxes, beside, only_first
from engines.ops.op import Inputs, Op, Types

CENTRE = 8              # what stands for 0 where no offsets are given


class FakeQuantizeBlocks(Op):
    """Each block of the last axis as the integers that QuantizeBlocks makes of it mean it: a float again."""
    attributes = ("block",)

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        return (x,)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return (beside(outputs[0].shape, only_first(axes), (-1,), "rounds blocks along"),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        scales, numbers = rounded(x, node.attrs["block"])
        return real_rows(scales, numbers)[..., :x.shape[-1]].astype(x.dtype)


class QuantizeBlocks(FakeQuantizeBlocks):
    """Each block of the last axis as bytes: a HEAD, then an integer for each number, of zeros behind the last one."""

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
    """x, or what QuantizeBlocks makes of it; q (two a byte, the lower bits first), scales, offsets or "", bias or "".
    depth: of the inner axis."""
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
    """uint8 [rows, columns] of 0 to 15 -> two a byte"""
    even = np.pad(q, ((0, 0), (0, q.shape[1] % 2)))
    return np.asarray(even[:, ::2] | even[:, 1::2] << 4, np.uint8)


def unpacked(q: Array, depth: int) -> Array:
    return np.stack([q & 15, q >> 4], -1).reshape(len(q), -1)[:, :depth]


def in_blocks(q: Array, scales: Array, offsets: Array | None, block: int) -> Array:
    """The weights, float32."""
    offsets = -CENTRE * scales if offsets is None else offsets
    scale, offset = (np.repeat(array.astype(np.float64), block, 1)[:, :q.shape[1]] for array in (scales, offsets))
    return np.asarray(q * scale + offset, np.float32)
