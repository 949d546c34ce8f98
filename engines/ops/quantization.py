"""Quantisation, real = scale * (stored - zero_point), per tensor or per index of `axis`.

FakeQuantize quantises and dequantises: a Q/DQ pair of a model inside this compiler. At the end of a kernel it defines
the stored form of the result; elsewhere it only rounds.
"""
from __future__ import annotations

import math

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.dtypes import FLOAT, integer_limits
from infer_server.engines.ir.graph import Array, Dim, Node, TensorType
from infer_server.engines.ir.rounding import STEPS, row_scales
from infer_server.engines.ir.shapes import fixed, normal_axis, text
from infer_server.engines.ops.cast import narrowed
from infer_server.engines.ops.items import ItemAxes, only_first, untouched_axis
from infer_server.engines.ops.op import Inputs, Op, Stored, Types, present
from infer_server.engines.ops.pointwise import Epilogue


class _Linear(Op, abstract=True):
    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        x, scale = present(inputs[:2])
        along = (node.attrs.get("axis", 1),) if scale.shape not in ((), (1,)) else ()
        return (untouched_axis(x.shape, only_first(axes), along, "has a scale for each index of"),)


class QuantizeLinear(_Linear):
    """Quantisation saturate(round half to even(x / scale) + zero_point).

    Floats of eight bits or fewer are converted as by Cast, with the attribute `saturate`.
    """

    @classmethod
    def types(cls, node: Node, x: TensorType, scale: TensorType, zero_point: TensorType | None = None) -> Types:
        check_constants(node, (x, scale, zero_point))
        return (TensorType(zero_point.dtype if zero_point else np.dtype(np.uint8), x.shape),)

    @classmethod
    def compute(cls, node: Node, x: Array, scale: Array, zero_point: Array | None = None) -> Array:
        if zero_point is None:
            zero_point = np.zeros_like(scale, np.uint8)
        shift, limits = along_axis(node, x, zero_point).astype(np.float64), integer_limits(zero_point.dtype)
        steps = x / along_axis(node, x, scale)
        if limits is None:
            return narrowed(steps + shift, zero_point.dtype, bool(node.attrs.get("saturate", 1)))
        return np.clip(np.rint(steps) + shift, *limits).astype(zero_point.dtype)


class DequantizeLinear(_Linear):
    """Dequantisation (x - zero_point) * scale."""

    @classmethod
    def types(cls, node: Node, x: TensorType, scale: TensorType, zero_point: TensorType | None = None) -> Types:
        check_constants(node, (x, scale, zero_point))
        return (TensorType(scale.dtype, x.shape),)

    @classmethod
    def compute(cls, node: Node, x: Array, scale: Array, zero_point: Array | None = None) -> Array:
        exact = np.float32 if integer_limits(x.dtype) is None else np.int32
        real = x.astype(exact, order="C")       # changed in place, because weights may be large
        if zero_point is not None:
            _apply_along_axis(np.subtract, node, real, zero_point.astype(exact))
        real = real.astype(scale.dtype, copy=False)
        _apply_along_axis(np.multiply, node, real, scale)
        return real


class FakeQuantize(Epilogue):
    """Quantisation to the range `low`..`high` (uint8 if that suffices) and dequantisation."""

    @staticmethod
    def formula(x: Array, scale: float = 1.0, zero_point: int = 0, low: int = 0, high: int = 255) -> Array:
        step = x.dtype.type(scale)
        stored = np.clip(np.rint(x / step) + zero_point, low, high)
        return np.asarray((stored - zero_point) * step, x.dtype)


class ScaledRows(Op):
    """Division of each row by its scale, max |x| / steps along the last axis; the results are x / scale and scale.

    steps: 127, or 255 for an x without negative numbers. If the first result is stored in 8 bits with scale 1 and zero
    point 128 or 0, this is quantisation by row, with scales computed at run time. The scale of a row with NaN or
    infinity is NaN or infinity.
    """
    stored = Stored.CONVERTED       # applies to the first result only

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        return x, TensorType(FLOAT, (*x.shape[:-1], 1))

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return (untouched_axis(outputs[0].shape, only_first(axes), (-1,), "scales rows along"),) * 2

    @classmethod
    def compute(cls, node: Node, x: Array) -> tuple[Array, Array]:
        scales = row_scales(x, node.attrs.get("steps", STEPS))
        return x / scales, scales


def check_constants(node: Node, inputs: Inputs) -> None:
    """Raise GraphError unless scale and zero point have one shape: scalar, per index, or per block of the axis."""
    x, *constants = (t.shape for t in inputs if t is not None)
    if any(math.prod(fixed(shape)) == 1 and len(shape) <= 1 for shape in constants):
        expected: tuple[Dim, ...] = (1,)
        constants = [shape or (1,) for shape in constants]
    elif len(constants[0]) == 1:
        expected = (x[normal_axis(node.attrs.get("axis", 1), len(x))],)
    else:
        axis, block = node.attrs.get("axis", 1), node.attrs.get("block_size", 0)
        if block < 1:
            raise GraphError("block_size is missing, which scales of blocks along the axis need")
        expected = tuple(-(-d // block) if i == axis else d for i, d in enumerate(fixed(x)))
    if any(tuple(shape) != expected for shape in constants):
        raise GraphError(f"scale and zero point have shapes {' and '.join(map(text, constants))}, not {text(expected)}")


def _apply_along_axis(operation: np.ufunc, node: Node, x: Array, constants: Array) -> None:
    """Compute x = operation(x, constants) in place, for a contiguous x and constants along the node's axis."""
    block = node.attrs.get("block_size", 0)
    if constants.ndim > 1 and x.shape[axis := node.attrs.get("axis", 1) % x.ndim] % block == 0:
        x = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1:])
        operation(x, np.expand_dims(constants, axis + 1), out=x)
    else:
        operation(x, along_axis(node, x, constants), out=x)


def along_axis(node: Node, x: Array, constants: Array) -> Array:
    """Reshape `constants` to broadcast along the node's axis: a scalar, per index, or per block."""
    if constants.size == 1 and constants.ndim <= 1:
        return constants.reshape(())
    axis = node.attrs.get("axis", 1) % x.ndim
    if constants.ndim > 1:      # one scale per block of `block_size` elements
        blocks = np.repeat(constants, node.attrs["block_size"], axis)
        return np.take(blocks, range(x.shape[axis]), axis)
    return constants.reshape(-1, *[1] * (x.ndim - axis - 1))
