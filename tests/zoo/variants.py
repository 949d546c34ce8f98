"""Equivalent forms of a model in an ONNX file."""
from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper

SMALL = 128     # bytes; shape inference wants to read the shapes and axes without opening another file


def with_initializers_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """List every initialiser among the graph's inputs, too, as in files before IR version 4."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.graph.input.extend(helper.make_tensor_value_info(i.name, i.data_type, i.dims)
                              for i in model.graph.initializer)
    return result


def with_constant_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace initialisers by Constant nodes."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    constants = [helper.make_node("Constant", [], [i.name], name=f"/{i.name}/Constant", value=i)
                 for i in model.graph.initializer]
    nodes = [*constants, *model.graph.node]
    del result.graph.node[:], result.graph.initializer[:]
    result.graph.node.extend(nodes)
    return result


def save_with_external_data(model: onnx.ModelProto, path: Path) -> Path:
    """Write `path`, and its weights into one file with the suffix .data."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)            # saving moves the weights out of the message
    onnx.save(copy, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=SMALL)
    return path
