"""General rules for gathers by indices of any form, constant or not."""
from __future__ import annotations

from collections.abc import Sequence

from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter


@fallback_rule("Gather")
def lower_gather(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    data, index = node.inputs
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    axis = node.attrs.get("axis", 0) % len(ctx.type(data).shape)
    behind = axis + len(ctx.type(index).shape)
    if first_item(ctx, node):
        chosen = w.constant(0, "i64")
    else:
        chosen = w.wrapped_index(w.at(index, w.axes[axis:behind]), w.extent(data, axis))
    return [w.call(w.at(data, [*w.axes[:axis], chosen, *w.axes[behind:]]))]


def first_item(ctx: Context, node: Node) -> bool:
    """Return True if a Gather takes the first item of the batch, the only one that every batch has."""
    data, index = (ctx.graph.types[name] for name in node.inputs)
    of_items = data.shape[node.attrs.get("axis", 0) % len(data.shape)] == BATCH
    constant = ctx.graph.constants.get(node.inputs[1])
    return of_items and constant is not None and index.shape in ((), (1,)) and not constant.any()


@fallback_rule("GatherElements")
def lower_gather_elements(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    data, index = node.inputs
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    axis = node.attrs.get("axis", 0) % len(ctx.type(data).shape)
    indices = list(w.axes)
    indices[axis] = w.wrapped_index(w.broadcast(index), w.extent(data, axis))
    return [w.call(w.at(data, indices))]


@fallback_rule("GatherND")
def lower_gather_nd(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a GatherND: the last axis of the indices addresses the data's axes after the first `batch_dims`."""
    data, index = node.inputs
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    shared, outer = node.attrs.get("batch_dims", 0), len(ctx.type(index).shape) - 1
    depth = w.extent(index, outer)
    chosen = [w.wrapped_index(w.at(index, [*w.axes[:outer], w.constant(i, "i64")]), w.extent(data, shared + i))
              for i in range(depth)]
    return [w.call(w.at(data, [*w.axes[:shared], *chosen, *w.axes[outer:]]))]
