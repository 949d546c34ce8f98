"""General rules for pointwise nodes of every dtype and rank."""
from __future__ import annotations

from collections.abc import Sequence

from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.nest.pointwise import FORMULAS, write_node


@fallback_rule(*FORMULAS)
def lower_pointwise(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    writer = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    first = node.anchor
    try:
        value = write_node(first, [writer.broadcast(name) for name in first.inputs if name])
    except NotImplementedError as reason:
        raise Refused(str(reason)) from reason
    return [writer.call(writer.finished(value))]


@fallback_rule("BatchNormalization")
def lower_batch_norm(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a BatchNormalization with run-time scales and statistics per channel."""
    if node.attrs.get("channels_last") or any(node.outputs[1:]):
        raise Refused("only its first output, with channels first, is compiled")
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    x = w.at(node.inputs[0], w.axes)
    scale, bias, mean, variance = (w.at(name, [w.axes[1]]) for name in node.inputs[1:5])
    deviation = (variance + float(node.attrs.get("epsilon", 1e-5))).unary("sqrt")
    return [w.call((x - mean) / deviation * scale + bias)]
