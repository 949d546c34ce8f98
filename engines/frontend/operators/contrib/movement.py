"""Lower data-movement operators: earlier names of ONNX operators, quantised tables, windows of a tensor."""
from __future__ import annotations

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.contrib.linear import blocks_of_bits
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, contrib
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.shapes import fixed, normal_axis

_INT64 = 7          # TensorProto.INT64


@contrib("Trilu", "X:X k:L?", "upper=1")
@contrib("GatherND", "data:X indices:N")
def _under_the_same_name(call: OperatorCall) -> list[Node]:
    return StandardNodeBuilder(call).finish(call.node.op, *call.node.inputs, **call.keep("upper"))


@contrib("Pad", "data:T pads:L value:T?", "mode=constant")
def _pad(call: OperatorCall) -> list[Node]:
    """Lower Pad, whose pads may be [1, 2 * rank]."""
    w, (x, pads, *value) = StandardNodeBuilder(call), call.node.inputs
    return w.finish("Pad", x, w.reshape(pads, -1), *value, **call.keep("mode"))


@contrib("Range", "start:X limit:X delta:X?")
def _range(call: OperatorCall) -> list[Node]:
    """Lower Range, with a default step of 1 and inputs of shape [] or [1]."""
    w = StandardNodeBuilder(call)
    given = [w("Reshape", name, w.constant(np.zeros(0, np.int64))) for name in call.node.inputs]
    return w.finish("Range", *given, *([] if call.has(2) else [w.number(1, call.type().dtype)]))


@contrib("ExpandDims", "X:X axis:I")
def _expand_dims(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    axis = w.reshape(w("Cast", call.node.inputs[1], to=_INT64), 1)
    return w.finish("Unsqueeze", call.node.inputs[0], axis)


@contrib("Unique", "x:X", outputs=3)
def _unique(call: OperatorCall) -> list[Node]:
    """Lower Unique: values in order of first occurrence, the index of each element among them, and counts."""
    w = StandardNodeBuilder(call)
    values, _, places, counts = w.several("Unique", call.node.inputs[0], outputs=4, sorted=0)
    for index, name in enumerate((values, places, counts)):
        w.output(index, "Identity", name)
    return w.nodes


@contrib("Inverse", "X:T")
def _inverse(call: OperatorCall) -> list[Node]:
    return StandardNodeBuilder(call).finish("Inverse", *call.node.inputs, onnx_domain="com.microsoft", onnx_opset=1)


@contrib("GatherBlockQuantized", "data:X indices:N scales:T zero_points:X?",
         "bits=4 block_size=128 gather_axis=0 quantize_axis=1")
def _rows_of_a_table(call: OperatorCall) -> list[Node]:
    """Lower GatherBlockQuantized for rows of a uint8 table [rows, columns] with a scale for each block of a row."""
    w, shape = StandardNodeBuilder(call), fixed(call.type().shape)
    axes = [call.attr(f"{which}_axis", default) for which, default in (("gather", 0), ("quantize", 1))]
    if len(shape) != 2 or call.type().dtype != np.uint8 or axes not in ([0, 1], [0, -1]):
        raise GraphError("only rows gathered from a uint8 matrix that is quantised in blocks along its rows are "
                         "supported")
    columns = shape[1] * 8 // int(call.attr("bits", 4))
    table = blocks_of_bits(w, call, 0, 2, 3, shape[0], columns)
    return w.finish("Gather", table, call.node.inputs[1], axis=0)


@contrib("UnfoldTensor", "input:X", "dim=-1 size:int! step=1")
def _unfold(call: OperatorCall) -> list[Node]:
    """Lower UnfoldTensor: windows along an axis, with their elements as a new last axis."""
    rank, size, step = call.rank, int(call.attr("size")), int(call.attr("step", 1))
    axis = normal_axis(call.attr("dim", -1), rank)
    (extent,) = fixed([call.type().shape[axis]])
    if not 0 < size <= extent or step < 1:
        raise GraphError(f"a window of size {size} with step {step} does not fit an axis of extent {extent}")
    places = np.arange(0, extent - size + 1, step)[:, None] + np.arange(size)
    w = StandardNodeBuilder(call)
    windows = w("Gather", call.node.inputs[0], w.constant(places), axis=axis)
    order = [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1]
    return w.finish("Transpose", windows, perm=tuple(order))
