"""Lower contrib activations, activations with a bias, and those that fused operators name."""
from __future__ import annotations

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, contrib
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.shapes import fixed

# Activations of fused operators, with the attributes for their parameters, in order.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "Relu": (), "Tanh": (), "Sigmoid": (), "Softplus": (), "Softsign": (), "LeakyRelu": ("alpha",), "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Clip": ("min", "max")}


def activated(w: StandardNodeBuilder, call: OperatorCall, x: str, name: str | None,
              parameters: list[float | None]) -> list[Node]:
    """Finish with the activation of x, if any; `parameters` are in the order of its attributes, None for a default."""
    if not name:
        return w.finish("Identity", x)
    if name not in _PARAMETERS:
        raise GraphError(f"activation is '{name}', but must be one of {', '.join(_PARAMETERS)}")
    given = {key: value for key, value in zip(_PARAMETERS[name], parameters, strict=False) if value is not None}
    if name == "Clip":
        dtype = call.type().dtype
        return w.finish("Clip", x, *(w.number(given[key], dtype) if key in given else "" for key in ("min", "max")))
    return w.finish(name, x, **given)


@contrib("Gelu", "X:T")
def _gelu(call: OperatorCall) -> list[Node]:
    return StandardNodeBuilder(call).finish("Gelu", call.node.inputs[0])


@contrib("BiasGelu", "A:T B:T")
def _bias_gelu(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    return w.finish("Gelu", w("Add", *call.node.inputs))


@contrib("FastGelu", "X:T bias:T?")
def _fast_gelu(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    return w.finish("Gelu", w.plus(call.node.inputs[0], call, 1), approximate="tanh")


@contrib("GemmFastGelu", "X:T W:T bias:T?")
def _gemm_fast_gelu(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    return w.finish("Gelu", w.plus(w("MatMul", *call.node.inputs[:2]), call, 2), approximate="tanh")


@contrib("QuickGelu", "X:T", "alpha=1.702")
def _quick_gelu(call: OperatorCall) -> list[Node]:
    """Lower QuickGelu: x * sigmoid(alpha * x)."""
    return StandardNodeBuilder(call).finish("Swish", call.node.inputs[0], alpha=call.attr("alpha", 1.702))


@contrib("BiasSplitGelu", "X:T bias:T")
def _bias_split_gelu(call: OperatorCall) -> list[Node]:
    """Lower BiasSplitGelu: the first half of x + bias times the Gelu of the second."""
    w, half = StandardNodeBuilder(call), fixed(call.type().shape[-1:])[0] // 2
    x = w("Add", *call.node.inputs)
    return w.finish("Mul", w.cut(x, -1, 0, half), w("Gelu", w.cut(x, -1, half, 2 * half)))


@contrib("BiasAdd", "X:T bias:T skip:T")
def _bias_add(call: OperatorCall) -> list[Node]:
    x, bias, skip = call.node.inputs
    w = StandardNodeBuilder(call)
    return w.finish("Add", w("Add", x, bias), skip)
