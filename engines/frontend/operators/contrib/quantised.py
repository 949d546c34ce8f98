"""Lower contrib operators on quantised tensors to dequantisation, the float operator and quantisation.

Integer products become ONNX's MatMulInteger. Absent zero points are 0.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, contrib
from infer_server.engines.frontend.operators.normalise import RULES, OperatorCall
from infer_server.engines.ir.graph import Node, TensorType
from infer_server.engines.ir.shapes import fixed

_FLOAT = 1          # TensorProto.FLOAT
_UNARY = "X:Q x_scale:F x_zero_point:Q? y_scale:F y_zero_point:Q?"
_BINARY = "A:Q A_scale:F A_zero_point:Q? B:Q B_scale:F B_zero_point:Q? C_scale:F C_zero_point:Q?"


def _real(w: StandardNodeBuilder, call: OperatorCall, index: int, **attrs: int) -> str:
    """Dequantise input `index`; the next two inputs are its scale and zero point."""
    inputs = call.node.inputs
    return w("DequantizeLinear", *(name for name in inputs[index:index + 3] if name), **attrs)


def _stored(w: StandardNodeBuilder, call: OperatorCall, y: str, scale: int) -> list[Node]:
    """Finish with y quantised by input `scale` and the zero point after it, which defaults to 0 in input 0's dtype."""
    inputs = call.node.inputs
    zero = inputs[scale + 1] if call.has(scale + 1) else w.number(0, call.type().dtype)
    return w.finish("QuantizeLinear", y, inputs[scale], zero)


@contrib("QuantizeLinear", "x:T y_scale:T y_zero_point:X?", "axis:int")
@contrib("DequantizeLinear", "x:X x_scale:T x_zero_point:X?", "axis:int")
def _under_another_name(call: OperatorCall) -> list[Node]:
    """Lower to ONNX's operator, which had no 16-bit types at first."""
    return StandardNodeBuilder(call).finish(call.node.op, *call.node.inputs, **call.keep("axis"))


# ---- pointwise, pools, Concat
@contrib("QLinearAdd", _BINARY)
@contrib("QLinearMul", _BINARY)
def _binary(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    return _stored(w, call, w(call.node.op.removeprefix("QLinear"), _real(w, call, 0), _real(w, call, 3)), 6)


@contrib("QLinearSigmoid", _UNARY)
@contrib("QLinearLeakyRelu", _UNARY, "alpha=0.01")
def _unary(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    return _stored(w, call, w(call.node.op.removeprefix("QLinear"), _real(w, call, 0), **call.keep("alpha")), 3)


@contrib("QLinearWhere", "condition:B X:Q x_scale:F x_zero_point:Q Y:Q y_scale:F y_zero_point:Q z_scale:F "
                         "z_zero_point:Q")
def _where(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    return _stored(w, call, w("Where", call.node.inputs[0], _real(w, call, 1), _real(w, call, 4)), 7)


@contrib("QLinearSoftmax", _UNARY, "axis=-1 opset:int!")
def _softmax(call: OperatorCall) -> list[Node]:
    """Lower QLinearSoftmax of ONNX's `opset`; before 13 all axes from `axis` on are flattened."""
    w, x, axis = StandardNodeBuilder(call), call.node.inputs, call.attr("axis", -1)
    real = _real(w, call, 0)
    if call.attr("opset") < 13:
        lines = w("Softmax", w("Flatten", real, axis=axis % call.rank), axis=1)
        return _stored(w, call, w("Reshape", lines, w("Shape", x[0])), 3)
    return _stored(w, call, w("Softmax", real, axis=axis), 3)


@contrib("QLinearConcat", "Y_scale:F Y_zero_point:Q inputs:X...", "axis:int!")
def _concat(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    parts = [_real(w, call, index) for index in range(2, len(call.node.inputs), 3)]
    return w.finish("QuantizeLinear", w("Concat", *parts, axis=call.attr("axis")), *call.node.inputs[:2])


_POOL = "auto_pad=NOTSET ceil_mode=0 channels_last=0 count_include_pad=0 kernel_shape:ints! pads:ints strides:ints"


@contrib("QLinearAveragePool", _UNARY, _POOL)
@contrib("QLinearGlobalAveragePool", _UNARY, "channels_last=0")
def _pool(call: OperatorCall) -> list[Node]:
    w, last, rank = StandardNodeBuilder(call), call.attr("channels_last", 0), call.rank
    x = _real(w, call, 0)
    if last:
        x = w("Transpose", x, perm=(0, rank - 1, *range(1, rank - 1)))
    kept = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    y = w(call.node.op.removeprefix("QLinear"), x, **call.keep(*kept))
    return _stored(w, call, w("Transpose", y, perm=(0, *range(2, rank), 1)) if last else y, 3)


@contrib("NhwcMaxPool", "x:Q", "auto_pad=NOTSET ceil_mode=0 dilations:ints kernel_shape:ints! pads:ints strides:ints")
def _max_pool(call: OperatorCall) -> list[Node]:
    """Lower NhwcMaxPool to a MaxPool of the stored integers, whose order is that of the real values."""
    w, rank = StandardNodeBuilder(call), call.rank
    kept = call.keep("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
    y = w("MaxPool", w("Transpose", call.node.inputs[0], perm=(0, rank - 1, *range(1, rank - 1))), **kept)
    return w.finish("Transpose", y, perm=(0, *range(2, rank), 1))


@contrib("QLinearReduceMean", "data:Q data_scale:F data_zero_point:Q? reduced_scale:F reduced_zero_point:Q?",
         "axes:ints! keepdims:int!")
def _mean(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    axes = w.ints(*call.attr("axes"))
    return _stored(w, call, w("ReduceMean", _real(w, call, 0), axes, keepdims=call.attr("keepdims")), 3)


# ---- products
@contrib("QGemm", "A:Q a_scale:F a_zero_point:Q B:Q1 b_scale:F b_zero_point:Q1 C:I? y_scale:F? y_zero_point:Q2?",
         "alpha=1.0 transA=0 transB=0")
def _gemm(call: OperatorCall) -> list[Node]:
    """Lower QGemm: alpha * A B + C, with C in units of alpha * a_scale * b_scale; float without y_scale."""
    w, inputs, alpha, turned = StandardNodeBuilder(call), call.node.inputs, call.attr("alpha", 1.0), call.attr("transB",
                                                                                                               0)
    a, b = _real(w, call, 0), _real(w, call, 3, axis=0 if turned else 1)
    y = w("Gemm", a, b, alpha=alpha, transA=call.attr("transA", 0), transB=turned)
    if call.has(6):
        unit = w("Mul", w("Mul", inputs[1], inputs[4]), w.number(alpha, call.type(1).dtype))
        last = {"axis": len(call.type(6).shape) - 1} if call.type(6).shape else {}
        y = w("Add", y, w("DequantizeLinear", inputs[6], unit, **last))
    return _stored(w, call, y, 7) if call.has(7) else w.finish("Identity", y)


@contrib("MatMulIntegerToFloat", "A:Q B:Q1 a_scale:T b_scale:T a_zero_point:Q? b_zero_point:Q1? bias:T?")
def _matmul_to_float(call: OperatorCall) -> list[Node]:
    w, inputs = StandardNodeBuilder(call), (*call.node.inputs, *[""] * 3)
    y = product(w, (inputs[0], inputs[1], inputs[4], inputs[5]), w("Mul", *inputs[2:4]))
    return w.finish("Identity", w.plus(y, call, 6))


@contrib("DynamicQuantizeMatMul", "A:F B:Q b_scale:F b_zero_point:Q? bias:F?")
def _dynamic_matmul(call: OperatorCall) -> list[Node]:
    """Lower DynamicQuantizeMatMul, which quantises A by its range at run time."""
    w, inputs = StandardNodeBuilder(call), (*call.node.inputs, *[""] * 2)
    stored, scale, zero = w.several("DynamicQuantizeLinear", inputs[0], outputs=3)
    y = product(w, (stored, inputs[1], zero, inputs[3]), w("Mul", scale, inputs[2]))
    return w.finish("Identity", w.plus(y, call, 4))


def product(w: StandardNodeBuilder, operands: tuple[str, ...], unit: str) -> str:
    """Return unit * (A - a_zero_point) (B - b_zero_point).

    `operands` are A, B and their zero points, "" for an absent one.
    """
    return w("Mul", w("Cast", w("MatMulInteger", *operands), to=_FLOAT), unit)


@contrib("MatMulInteger16", "A:X B:X1")
def _matmul_of_16_bits(call: OperatorCall) -> list[Node]:
    """Lower MatMulInteger16 to a MatMul in int32, or in uint32 if both inputs are unsigned."""
    to = np.uint32 if all(call.type(i).dtype.kind == "u" for i in (0, 1)) else np.int32
    w = StandardNodeBuilder(call)
    return w.finish("MatMul", *(w("CastLike", name, w.number(0, np.dtype(to))) for name in call.node.inputs))


@contrib("QLinearConv", "x:Q x_scale:F x_zero_point:Q w:Q1 w_scale:F w_zero_point:Q1 y_scale:F y_zero_point:Q2 B:I?",
         "auto_pad=NOTSET channels_last=0 dilations:ints group=1 kernel_shape:ints pads:ints strides:ints")
def _conv(call: OperatorCall) -> list[Node]:
    """Lower to ONNX's QLinearConv; with channels_last the images are [N, ..., C], the weights as in ONNX."""
    w, rank, inputs = StandardNodeBuilder(call), call.rank, call.node.inputs
    attrs = call.keep("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    if not call.attr("channels_last", 0):
        return w.finish("QLinearConv", *inputs, **attrs)
    x = w("Transpose", inputs[0], perm=(0, rank - 1, *range(1, rank - 1)))
    return w.finish("Transpose", w("QLinearConv", x, *inputs[1:], **attrs), perm=(0, *range(2, rank), 1))


# ---- recurrent layers
@contrib("DynamicQuantizeLSTM", "X:F W:Q R:Q B:F? sequence_lens:I? initial_h:F? initial_c:F? P:F? W_scale:F "
         "W_zero_point:Q R_scale:F R_zero_point:Q", "activation_alpha:floats activation_beta:floats "
         "activations:strings clip:float direction=forward hidden_size:int input_forget=0", 3)
def _lstm(call: OperatorCall) -> list[Node]:
    """Lower DynamicQuantizeLSTM, with weights [directions, inputs, 4 * hidden] and scales per direction, or column.

    Inputs are rounded to 8 bits by their common range, states per item and step by their own range, as in ONNX Runtime
    with one thread per item.
    """
    w, node, given = StandardNodeBuilder(call), call.node, call.node.inputs
    (directions, size, columns), hidden = fixed(call.type(1).shape), fixed(call.type(2).shape)[1]
    scale, zero, *of_states = (_by_column(w, call, index, directions, columns) for index in (8, 9, 10, 11))
    matrix = w.reshape(w("Transpose", given[1], perm=(1, 0, 2)), size, directions * columns)
    stored, step, middle = w.several("DynamicQuantizeLinear", w("Transpose", given[0], perm=(1, 0, 2)), outputs=3)
    gates = product(w, (stored, matrix, middle, zero), w("Mul", step, scale))
    dequantized = w("DequantizeLinear", given[2], *(w.reshape(name, directions, 1, columns) for name in of_states),
                    axis=1, block_size=hidden)
    weights = w("Transpose", dequantized, perm=(0, 2, 1))
    recurrent = TensorType(np.dtype(np.float32), (directions, columns, hidden))
    (plain,) = RULES["LSTM"](replace(call, node=replace(node, op="LSTM"), types=(None, None, recurrent)))
    made = w.several("DynamicQuantizeLSTM", w("Transpose", gates, perm=(1, 0, 2)), "", weights, *given[3:8],
                     outputs=len(node.outputs), **plain.attrs)
    for index, name in enumerate(made):
        w.output(index, "Identity", name)
    return w.nodes


def _by_column(w: StandardNodeBuilder, call: OperatorCall, index: int, directions: int, columns: int) -> str:
    """Return scales or zero points expanded to all columns of all directions."""
    shape = fixed(call.type(index).shape)
    if shape not in ((directions,), (directions, columns)):
        raise GraphError(f"scales or zero points of shape {list(shape)} must have one value per direction or per "
                         "column")
    rows = w.reshape(call.node.inputs[index], directions, -1)
    return w.reshape(w("Expand", rows, w.ints(directions, columns)), -1)
