"""Operators that make a tensor from numbers."""
from __future__ import annotations

import math

import numpy as np

from engines.errors import GraphError, UnknownTensorError
from engines.ir.graph import Array, Node, TensorType
from engines.ir.shapes import Extent, dim, extent, fixed
from engines.ops.items import ItemAxes, repeated
from engines.ops.op import Inputs, Op, Types, Values, present


class ConstantOfShape(Op):
    """The attribute `value` (one element) in every place of the attribute `shape`."""

    @classmethod
    def types(cls, node: Node) -> Types:
        return (TensorType(cls._value(node).dtype, tuple(node.attrs["shape"])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return repeated(outputs[0].shape)

    @classmethod
    def compute(cls, node: Node, *arrays: Array) -> Array:
        return np.full(fixed(node.attrs["shape"]), cls._value(node))

    @staticmethod
    def _value(node: Node) -> Array:
        return np.asarray(node.attrs.get("value", np.float32(0))).reshape(())


class Range(Op):
    """start, start + delta, ... below limit; three scalars."""

    @classmethod
    def types_with(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        first, *_ = present(inputs)
        if any(v is None for v in values) or len(values) < 3:
            raise UnknownTensorError("its length depends on data: make start, limit and delta constants", node.inputs)
        start, limit, delta = (v.item() for v in values if v is not None)
        if delta == 0 or any(isinstance(v, float) and not math.isfinite(v) for v in (start, limit, delta)):
            raise GraphError(f"from {start} to {limit} by {delta}: no number of steps")
        length = limit - start
        if delta != 1 or not isinstance(length, Extent):
            length = max(math.ceil(length / delta), 0)
        return (TensorType(first.dtype, (dim(extent(dim(length))),)),)

    @classmethod
    def compute(cls, node: Node, *arrays: Array) -> Array:
        start, limit, delta = (a.item() for a in arrays)
        length = max(math.ceil((limit - start) / delta), 0)
        return np.asarray(start + delta * np.arange(length), arrays[0].dtype)
