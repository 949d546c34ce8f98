"""Along an axis: TopK, ArgMax, ArgMin -> TopK; CumSum -> CumulativeSum."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.ir.graph import Node
from engines.lowering.calls.calls import Call, Context, Refused, lowers
from engines.lowering.calls.placement import Placement
from engines.lowering.problems.elementwise import WIDEST_TOP_K, CumulativeSum, TopK

ORDERED = ("float32", "int32")


@lowers("TopK")
def lower_top_k(ctx: Context, node: Node) -> Sequence[Call]:
    x = _rows(ctx, node, -1)
    values, indices = (ctx.placements[name] for name in node.outputs)
    spec = TopK(x.view, values.view, indices.view, bool(node.attrs.get("largest", 1)))
    return [Call(node, spec, (x,), (values, indices))]


@lowers("ArgMax", "ArgMin")
def lower_arg(ctx: Context, node: Node) -> Sequence[Call]:
    """The place of the first of the k."""
    x, y = _rows(ctx, node, 0), ctx.placements[node.outputs[0]]
    if node.attrs.get("select_last_index", 0):
        raise Refused("only the first of equals is looked for")
    view = y.view
    if not node.attrs.get("keepdims", 1):
        view = replace(view, shape=(*view.shape, 1), strides=(*view.strides, view.size))
    return [Call(node, TopK(x.view, None, view, node.op == "ArgMax"), (x,), (y,))]


def _rows(ctx: Context, node: Node, default: int) -> Placement:
    """Where the node's input lies, if its axis is one that the kernel works along."""
    x, shape = ctx.placements[node.inputs[0]], ctx.type(node.inputs[0]).shape
    if len(shape) < 2 or node.attrs.get("axis", default) % len(shape) != len(shape) - 1:
        raise Refused("only along the innermost axis, behind the batch, is it compiled")
    if x.view.dtype not in ORDERED or x.view.strides[-1] != x.view.size or x.view.shape[-1] > WIDEST_TOP_K:
        raise Refused(f"rows are compiled of up to {WIDEST_TOP_K} {' or '.join(ORDERED)} in one piece")
    return x


@lowers("CumSum")
def lower_cumulative_sum(ctx: Context, node: Node) -> Sequence[Call]:
    x, y = ctx.placements[node.inputs[0]], ctx.placements[node.outputs[0]]
    axis = node.attrs["axis"] - 1
    if axis < 0:
        raise Refused("it sums over the items of a batch")
    spec = CumulativeSum(x.view, y.view, axis, bool(node.attrs.get("exclusive", 0)), bool(node.attrs.get("reverse", 0)))
    return [Call(node, spec, (x,), (y,))]
