"""Rules for gathers: Gather -> Take (constant index), Lookup (constant table) or Permute (shuffle); GatherElements."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.lowering.calls.broadcast import broadcast
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.calls.placement import Placement, as_one_item
from infer_server.engines.lowering.problems.movement import GatherElements, Lookup, Permute, Take
from infer_server.engines.lowering.problems.view import dense_view

INDICES = ("int32", "int64")


@lowers("Gather")
def lower_gather(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    data, index = node.inputs
    output, y = ctx.type(node.outputs[0]), ctx.placements[node.outputs[0]]
    if data in ctx.graph.constants:
        table, axis = ctx.constant(data), node.attrs.get("axis", 0)
        if (table.ndim != 2 or axis % 2 or output.quant != ctx.type(data).quant
                or ctx.placements[index].view.dtype not in INDICES):
            raise Refused("only rows of a constant matrix are looked up, without conversion")
        if not ctx.type(index).shape:       # one row without a leading axis
            y = as_one_item(y)
        lookup = Lookup(ctx.placements[index].view, y.view, len(table))
        return [ProblemCall(node, lookup, (ctx.placements[index],), (y,), {"table": table})]
    x, axis = ctx.placements[data], node.attrs.get("axis", 0) % len(ctx.type(data).shape) - 1
    picked = ctx.constant(index)
    if axis < 0 or picked.ndim > 1 or output.quant != ctx.type(data).quant:
        raise Refused("only a constant index along one axis after the batch is compiled")
    if axis == len(x.view.shape) - 1 and picked.ndim == 1 and (groups := _shuffled_groups(picked, x.view.shape[-1])):
        return [_shuffle(node, x, y, groups)]
    inside = x.view.shape[axis + 1:]
    if any(v.strides[len(v.strides) - len(inside):] != dense_view(v.dtype, inside).strides for v in (x.view, y.view)):
        raise Refused("the axes after the index are not contiguous")
    view = y.view
    if picked.ndim == 0:
        view = replace(view, shape=(*view.shape[:axis], 1, *view.shape[axis:]),
                       strides=(*view.strides[:axis], 0, *view.strides[axis:]))
    return [ProblemCall(node, Take(x.view, view, axis), (x,), (y,), {"index": np.atleast_1d(picked)})]


@lowers("GatherElements")
def lower_gather_elements(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    data, index = node.inputs
    x, y, axis = ctx.placements[data], ctx.placements[node.outputs[0]], node.attrs["axis"] - 1
    positions = broadcast(ctx, index, node.outputs[0])
    if axis < 0 or positions.dtype not in INDICES or ctx.type(data).quant != ctx.type(node.outputs[0]).quant:
        raise Refused("only an index of int32 or int64 along an axis after the batch is compiled")
    return [ProblemCall(node, GatherElements(x.view, y.view, positions, axis), (x, ctx.placements[index]), (y,))]


def _shuffled_groups(index: Array, channels: int) -> int:
    """Return the number of channel groups that the index interleaves, or 0 if it is not a shuffle."""
    if len(index) != channels:
        return 0
    groups = (g for g in range(2, channels) if channels % g == 0)
    return next((g for g in groups if np.array_equal(index, np.arange(channels).reshape(g, -1).T.ravel())), 0)


def _shuffle(node: Node, x: Placement, y: Placement, groups: int) -> ProblemCall:
    """Return a transpose of [group, channel of the group] to [channel of the group, group]."""
    each, (*outer, size) = x.view.shape[-1] // groups, x.view.strides
    shape = (*x.view.shape[:-1], each, groups)
    apart = replace(x.view, shape=shape, strides=(*outer, size, each * size))
    together = replace(y.view, shape=shape, strides=(*y.view.strides[:-1], groups * size, size))
    return ProblemCall(node, Permute(apart, together), (x,), (y,), {"program": []})
