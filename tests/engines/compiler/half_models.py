"""float32 models as exporters write them in 16 bits."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DTYPES = {TensorProto.FLOAT16: np.float16, TensorProto.BFLOAT16: ml_dtypes.bfloat16}


def halved(model: onnx.ModelProto, to: int = TensorProto.FLOAT16, keep_io: bool = False) -> onnx.ModelProto:
    """Return a copy whose float32 tensors are `to`. keep_io: inputs and outputs stay float32, next to Casts."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    if to == TensorProto.BFLOAT16:
        result.opset_import[0].version = 22         # the first that has it in all operators
    graph = result.graph
    for tensor in graph.initializer:
        _halve(tensor, to)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = to
            if attribute.HasField("t"):
                _halve(attribute.t, to)
    if keep_io:
        _cast_at_borders(graph, to)
    else:
        for value in _floats(graph):
            value.type.tensor_type.elem_type = to
    return result


def _halve(tensor: onnx.TensorProto, to: int) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(DTYPES[to]), tensor.name))


def _floats(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    return [value for value in (*graph.input, *graph.output) if value.type.tensor_type.elem_type == TensorProto.FLOAT]


def _cast_at_borders(graph: onnx.GraphProto, to: int) -> None:
    names = {value.name for value in _floats(graph)}
    for node in graph.node:
        for tensors in (node.input, node.output):
            tensors[:] = [f"{name}.half" if name in names else name for name in tensors]
    inside = list(graph.node)
    del graph.node[:]
    inputs = {value.name for value in graph.input}
    graph.node.extend(helper.make_node("Cast", [name], [f"{name}.half"], to=to) for name in sorted(names & inputs))
    graph.node.extend(inside)
    graph.node.extend(helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT)
                      for name in sorted(names - inputs))
