"""A matrix product by weights of four bits, with a scale and an offset for each block of the inner axis.

    w[n, k] = scales[n, b] * q[n, k] + offsets[n, b]        b = k // block, q whole numbers from 0 to 15

Graphs have it once types are chosen (passes/quantization/weights.py); until then the weights are float constants.
"""
from __future__ import annotations

import numpy as np

from engines.ir.graph import Array, Node, TensorType
from engines.ops.items import ItemAxes, only_first
from engines.ops.op import Inputs, Op, Types

CENTRE = 8              # what stands for 0 where no offsets are given


class MatMulBlocks(Op):
    """x, q (two a byte, the lower bits first), scales, offsets or "", bias or "". depth: of the inner axis."""
    attributes = ("block", "depth")

    @classmethod
    def types(cls, node: Node, x: TensorType, q: TensorType, *_: TensorType | None) -> Types:
        return (TensorType(x.dtype, (*x.shape[:-1], q.shape[0])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return (only_first(axes),)

    @classmethod
    def compute(cls, node: Node, x: Array, q: Array, scales: Array, offsets: Array | None = None,
                bias: Array | None = None) -> Array:
        weights = in_blocks(unpacked(q, node.attrs["depth"]), scales, offsets, node.attrs["block"])
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
