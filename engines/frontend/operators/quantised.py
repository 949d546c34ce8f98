"""Lower operators on quantised tensors to dequantisation, the float operator and quantisation."""
from __future__ import annotations

from dataclasses import replace

from infer_server.engines.frontend.operators.normalise import OperatorCall, normalise, rule
from infer_server.engines.frontend.operators.parts import NodeBuilder
from infer_server.engines.ir.graph import Node


def _real(w: NodeBuilder, call: OperatorCall, index: int, axis: int) -> str:
    """Dequantise input `index`; the next two inputs are its scale and zero point, scalar or along the axis."""
    along = {"axis": axis % len(call.type(index).shape)} if call.type(index + 1).shape not in ((), (1,)) else {}
    return w("DequantizeLinear", *call.node.inputs[index:index + 3], **along)


def _quantised(w: NodeBuilder, call: OperatorCall, y: str, axis: int) -> list[Node]:
    along = {"axis": axis} if call.type(6).shape not in ((), (1,)) else {}
    return w.finish("QuantizeLinear", y, *call.node.inputs[6:8], **along)


@rule("QLinearConv")
def _convolution(call: OperatorCall) -> list[Node]:
    """Lower QLinearConv, whose bias is in units of x_scale * w_scale."""
    w, inputs = NodeBuilder(call), call.node.inputs
    operands, kinds = [_real(w, call, 0, 1), _real(w, call, 3, 0)], [call.type(0), call.type(3)]
    if call.has(8):
        bias = w("Cast", inputs[8], to=call.type(1).dtype.name)
        operands.append(w("Mul", bias, w("Mul", inputs[1], inputs[4])))
        kinds.append(call.type(8))
    conv = replace(call, node=replace(call.node, op="Conv", inputs=tuple(operands)), types=kinds)
    (made,) = normalise(conv)
    return _quantised(w, call, w("Conv", *operands, **made.attrs), 1)


@rule("QLinearMatMul")
def _product(call: OperatorCall) -> list[Node]:
    """Lower QLinearMatMul, with scales per row of the left factor or per column of the right one."""
    w = NodeBuilder(call)
    y = w("MatMul", _real(w, call, 0, -2), _real(w, call, 3, -1))
    return _quantised(w, call, y, -2 % max(len(call.type(0).shape), len(call.type(3).shape)))


@rule("ConvInteger")
def _integer_convolution(call: OperatorCall) -> list[Node]:
    (made,) = normalise(replace(call, node=replace(call.node, op="Conv")))
    return call.node_with(4, **made.attrs)
