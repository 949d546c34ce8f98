"""Rules along an axis: TopK, ArgMax, ArgMin -> TopK; CumSum, CumProd -> CumulativeSum."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.calls.placement import Placement, as_one_item
from infer_server.engines.lowering.problems.elementwise import (
    MOST_OF_WIDE,
    WIDEST_OF_FEW,
    WIDEST_TOP_K,
    CumulativeSum,
    TopK,
)

ORDERED = ("float32", "int32")


@lowers("TopK")
def lower_top_k(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a TopK along any axis, viewed as the innermost one."""
    rank = len(ctx.type(node.inputs[0]).shape)
    axis = node.attrs.get("axis", -1) % rank
    placements = [ctx.placements[name] for name in (node.inputs[0], *node.outputs)]
    if placements[0].items == BATCH:
        if not axis:
            raise Refused("it orders the items of a batch")
        axis -= 1
    else:
        placements = [as_one_item(placement) for placement in placements]
    x, values, indices = (_last(placement, axis) for placement in placements)
    if x.view.dtype not in TopK.computes_on or x.view.shape[-1] > widest(x.view.dtype, indices.view.shape[-1]):
        raise Refused(f"rows are limited to {WIDEST_TOP_K} elements of 32 bits, {WIDEST_OF_FEW} for k up to "
                      f"{MOST_OF_WIDE}, and to half of that for 64 bits")
    spec = TopK(x.view, values.view, indices.view, bool(node.attrs.get("largest", 1)))
    return [ProblemCall(node, spec, (x,), (values, indices))]


def widest(dtype: str, k: int) -> int:
    """Return the widest row for a top-k of k elements."""
    return (WIDEST_OF_FEW if k <= MOST_OF_WIDE else WIDEST_TOP_K) // (1 + (dtype in TopK.wide))


def _last(placement: Placement, axis: int) -> Placement:
    """View an axis of the item as the innermost one."""
    view = placement.view
    order = sorted(range(len(view.shape)), key=lambda i: i == axis)
    return replace(placement, view=replace(view, shape=tuple(view.shape[i] for i in order),
                                           strides=tuple(view.strides[i] for i in order)))


@lowers("ArgMax", "ArgMin")
def lower_arg(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower to a TopK with k = 1 that returns the index only."""
    x, y = _rows(ctx, node, 0), ctx.placements[node.outputs[0]]
    if node.attrs.get("select_last_index", 0):
        raise Refused("only the first index among equals is compiled")
    view = y.view
    if not node.attrs.get("keepdims", 1):
        view = replace(view, shape=(*view.shape, 1), strides=(*view.strides, view.size))
    return [ProblemCall(node, TopK(x.view, None, view, node.op == "ArgMax"), (x,), (y,))]


def _rows(ctx: Context, node: Node, default: int) -> Placement:
    """Return the placement of the node's input if its axis is supported."""
    x, shape = ctx.placements[node.inputs[0]], ctx.type(node.inputs[0]).shape
    if len(shape) < 2 or node.attrs.get("axis", default) % len(shape) != len(shape) - 1:
        raise Refused("only the innermost axis, after the batch, is compiled")
    if x.view.dtype not in ORDERED or x.view.strides[-1] != x.view.size or x.view.shape[-1] > widest(x.view.dtype, 1):
        raise Refused(f"rows have to be contiguous, of up to {WIDEST_OF_FEW} {' or '.join(ORDERED)}")
    return x


@lowers("CumSum", "CumProd")
def lower_cumulative_sum(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    x, y, axis = *(ctx.placements[name] for name in (node.inputs[0], node.outputs[0])), node.attrs["axis"] - 1
    if axis < 0:
        if x.items == BATCH:
            raise Refused("it sums over the items of a batch")
        x, y, axis = as_one_item(x), as_one_item(y), 0
    spec = CumulativeSum(x.view, y.view, axis, bool(node.attrs.get("exclusive", 0)), bool(node.attrs.get("reverse", 0)),
                         product=node.op == "CumProd")
    return [ProblemCall(node, spec, (x,), (y,))]
