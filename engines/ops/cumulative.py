"""Sums of all elements so far."""
from __future__ import annotations

import numpy as np

from engines.ir.graph import Array, Node
from engines.ops.op import SameShape


class CumSum(SameShape):
    """y[i] = x[0] + ... + x[i] along `axis`; `exclusive`: without x[i]; `reverse`: from the last element backwards."""
    along = "axis"

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        axis = node.attrs["axis"]
        if node.attrs.get("reverse", 0):
            x = np.flip(x, axis)
        y = np.cumsum(x, axis, x.dtype)
        if node.attrs.get("exclusive", 0):
            y = np.roll(y, 1, axis)
            np.moveaxis(y, axis, 0)[:1] = 0
        return np.ascontiguousarray(np.flip(y, axis) if node.attrs.get("reverse", 0) else y)
