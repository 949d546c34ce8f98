"""Lower classification losses, the last nodes of evaluation models.

    nll(x, t)[n, d...] = -x[n, t[n, d...], d...] * weight[t[n, d...]]           0 where t is ignore_index
    cross entropy(x, t) = nll(log softmax(x), t)

A mean is weighted: the sum of losses over the sum of weights, which are 0 where the target is ignored.
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.normalise import OperatorCall, rule
from infer_server.engines.frontend.operators.parts import NodeBuilder
from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.shapes import text


@rule("NegativeLogLikelihoodLoss")
def _nll(call: OperatorCall) -> list[Node]:
    w = NodeBuilder(call)
    return _likelihood(call, w, call.node.inputs[0])


@rule("SoftmaxCrossEntropyLoss")
def _cross_entropy(call: OperatorCall) -> list[Node]:
    w = NodeBuilder(call)
    logarithms = w("LogSoftmax", call.node.inputs[0], axis=1)
    w.output(1, "Identity", logarithms)
    return _likelihood(call, w, logarithms)


def _likelihood(call: OperatorCall, w: NodeBuilder, x: str) -> list[Node]:
    shape, kind = call.type().shape, call.type(1)
    if len(shape) < 2 or (shape[0], *shape[2:]) != kind.shape:
        raise GraphError(f"the target's shape is {text(kind.shape)}, but must be {text((shape[0], *shape[2:]))}")
    target, ignored, counts = call.node.inputs[1], call.attr("ignore_index"), ""
    zero = w.constant(np.zeros((), call.type().dtype))
    if ignored is not None:
        counts = w("Not", w("Equal", target, w.constant(np.array(ignored, kind.dtype))))
        target = w("Where", counts, target, w.constant(np.zeros((), kind.dtype)))
    picked = w("GatherElements", x, w("Unsqueeze", target, axes=(1,)), axis=1)
    loss, share = w("Neg", w("Squeeze", picked, axes=(1,))), ""
    if call.has(2):
        share = w("Gather", call.node.inputs[2], target, axis=0)
        loss = w("Mul", loss, share)
    if counts:
        share = w("Where", counts, share, zero) if share else w("Cast", counts, to=call.type().dtype.name)
        loss = w("Where", counts, loss, zero)
    every = {"axes": tuple(range(len(kind.shape))), "keepdims": 0}
    reduction = call.attr("reduction", "mean")
    if reduction == "none":
        return w.finish("Identity", loss)
    if reduction == "sum" or not share:
        return w.finish("ReduceSum" if reduction == "sum" else "ReduceMean", loss, **every)
    return w.finish("Div", w("ReduceSum", loss, **every), w("ReduceSum", share, **every))
