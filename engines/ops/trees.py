"""Forests of decision trees, as tables of all nodes."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ops.items import ItemAxes, only_first, untouched_axis
from infer_server.engines.ops.op import Inputs, Op, Types

LEFT_IF_EQUAL, LEFT_IF_MISSING = 1, 2       # bits of a node's flags, ...
FLAGS = 2                                   # ... which are the low bits of its column field
COLUMN, THRESHOLD, RIGHT, LEFT = range(4)   # fields of a node's record
ROWS_AT_ONCE = 1024                         # rows per step of the reference, which bounds its memory
_AGGREGATES: Mapping[str, Callable[..., Array]] = {"SUM": np.sum, "AVERAGE": np.mean, "MIN": np.min, "MAX": np.max}


def threshold_type(records: np.dtype[Any]) -> np.dtype[Any]:
    """Return the float dtype of thresholds whose bits are stored in records of an integer dtype."""
    return np.dtype(f"float{8 * records.itemsize}")


class Forest(Op):
    """Sum, average, minimum or maximum of the leaf weights that a row of x reaches in all trees.

    x [N, columns]; records of nodes [nodes, 4] and their weights [nodes, targets]; roots [trees]. A record has the
    column with flags, the threshold, the right and the left child (a leaf's own number), as integers of the threshold's
    width; the threshold is stored by its bits. A row goes left if x <= threshold or, by the flags, if they are equal,
    and if x is NaN. `depth` is the largest number of steps from a root to a leaf. Early exits need tables with all
    leaves after the inner nodes.
    """

    @classmethod
    def types(cls, node: Node, x: TensorType, nodes: TensorType, roots: TensorType, weights: TensorType) -> Types:
        if len(x.shape) != 2 or nodes.shape != (weights.shape[0], 4):
            raise GraphError("the tables of nodes must have equal lengths, and x must be a matrix")
        return (TensorType(weights.dtype, (x.shape[0], weights.shape[1])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        x = inputs[0]
        assert x is not None
        return (untouched_axis(x.shape, only_first(axes), (1,), "reads along"),)

    @classmethod
    def compute(cls, node: Node, x: Array, *tables: Array) -> Array:
        parts = [cls._rows(node, x[start:start + ROWS_AT_ONCE], *tables)
                 for start in range(0, max(len(x), 1), ROWS_AT_ONCE)]
        return np.concatenate(parts)

    @classmethod
    def _rows(cls, node: Node, x: Array, nodes: Array, roots: Array, weights: Array) -> Array:
        flagged, bits, right, left = np.ascontiguousarray(nodes.T)
        columns, flags = flagged >> FLAGS, flagged & (1 << FLAGS) - 1
        thresholds = bits.view(threshold_type(nodes.dtype))
        place = np.broadcast_to(roots, (len(x), len(roots)))
        for _ in range(node.attrs["depth"]):
            value, threshold, flag = np.take_along_axis(x, columns[place], 1), thresholds[place], flags[place]
            goes_left = np.where(flag & LEFT_IF_EQUAL, value == threshold, value <= threshold)
            goes_left |= np.isnan(value) & (flag & LEFT_IF_MISSING > 0)
            children = np.where(goes_left, left[place], right[place])
            if np.array_equal(children, place):
                break
            place = children
        return np.asarray(_AGGREGATES[node.attrs["aggregate"]](weights[place], axis=1), weights.dtype)
