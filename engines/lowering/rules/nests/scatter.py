"""General rules for scatters: a copy of the data, whose elements updates replace or combine with, in order."""
from __future__ import annotations

from collections.abc import Sequence

from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter

COMBINED = {"none": "", "add": "add", "mul": "mul", "max": "max", "min": "min"}


@fallback_rule("ScatterElements")
def lower_scatter_elements(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    data, index, updates = node.inputs
    w = NestWriter(ctx, node, ctx.type(updates).shape)
    axis = node.attrs.get("axis", 0) % len(ctx.type(data).shape)
    indices = list(w.axes)
    indices[axis] = w.wrapped_index(w.at(index, w.axes), w.extent(data, axis))
    return [w.scatter(data, w.at(updates, w.axes), indices, COMBINED[node.attrs.get("reduction", "none")])]


@fallback_rule("Unpool")
def lower_unpool(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    x, index, elsewhere = node.inputs
    w = NestWriter(ctx, node, ctx.type(x).shape)
    return [w.scatter(elsewhere, w.at(x, w.axes), [w.wrapped_index(w.at(index, w.axes), node.attrs["size"])])]


@fallback_rule("ScatterND")
def lower_scatter_nd(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a ScatterND: the last axis of the indices addresses the data's first axes."""
    data, index, updates = node.inputs
    w = NestWriter(ctx, node, ctx.type(updates).shape)
    outer = len(ctx.type(index).shape) - 1
    chosen = [w.wrapped_index(w.at(index, [*w.axes[:outer], w.constant(i, "i64")]), w.extent(data, i))
              for i in range(w.extent(index, outer))]
    return [w.scatter(data, w.at(updates, w.axes), [*chosen, *w.axes[outer:]],
                      COMBINED[node.attrs.get("reduction", "none")])]
