"""Sums of all elements so far."""
from __future__ import annotations

import numpy as np

from engines.ir.graph import Array, Node, TensorType
from engines.ops.items import ItemAxes, beside, only_first
from engines.ops.op import Inputs, Op, Types, Values


class CumSum(Op):
    """y[i] = x[0] + ... + x[i] along `axis`; `exclusive`: without x[i]; `reverse`: from the last element backwards."""
    along = "axis"

    @classmethod
    def types(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        x, = inputs
        assert x is not None
        return (TensorType(x.dtype, x.shape),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return (beside(outputs[0].shape, only_first(axes), (node.attrs["axis"],), "sums along"),)

    @classmethod
    def compute(cls, node: Node, *arrays: Array) -> Array:
        x, = arrays
        axis = node.attrs["axis"]
        if node.attrs.get("reverse", 0):
            x = np.flip(x, axis)
        y = np.cumsum(x, axis, x.dtype)
        if node.attrs.get("exclusive", 0):
            y = np.roll(y, 1, axis)
            np.moveaxis(y, axis, 0)[:1] = 0
        return np.ascontiguousarray(np.flip(y, axis) if node.attrs.get("reverse", 0) else y)
