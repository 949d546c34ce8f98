"""Adapts an exported ONNX model to TensorRT: symmetric INT8 quantisation, or float16 tensors.

    q = clip(round(x / s), -128, 127),  s = max(-low, high) / 127

[low, high] is the range that the asymmetric uint8 quantisation of the graph represents.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIGHEST = 65504.0       # largest finite float16
FLOAT_OPERANDS = {"Resize": (1, 2), "QuantizeLinear": (1,), "DequantizeLinear": (1,)}      # inputs that stay float32


def symmetric(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace uint8 activations with any zero point by int8 activations with zero point 0, in place."""
    graph = model.graph
    tables = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    added: dict[str, onnx.TensorProto] = {}
    for node in graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.input[0] in tables:
            continue
        scale = tables[node.input[1]]
        zero = tables[node.input[2]] if len(node.input) > 2 else np.zeros(scale.shape, np.uint8)
        if zero.dtype != np.uint8:
            continue
        ends = np.stack([zero.astype(np.float64), 255.0 - zero]) * scale
        arrays = {f"{node.input[1]}.symmetric": (ends.max(0) / 127).astype(np.float32),
                  f"{node.input[1]}.middle": np.zeros(scale.shape, np.int8)}
        added.update({name: numpy_helper.from_array(array, name) for name, array in arrays.items()})
        node.input[:] = [node.input[0], *arrays]
    graph.initializer.extend(added.values())
    return _without_unused(model)


def halved(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert float32 tensors to float16, in place. The model's inputs and outputs stay float32 and are cast."""
    graph = model.graph
    kept = {node.input[at] for node in graph.node for at in FLOAT_OPERANDS.get(node.op_type, ())
            if at < len(node.input)}
    for one in graph.initializer:
        if one.data_type == TensorProto.FLOAT and one.name not in kept:
            halves = np.clip(numpy_helper.to_array(one), -HIGHEST, HIGHEST).astype(np.float16)
            one.CopyFrom(numpy_helper.from_array(halves, one.name))
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    before, after = _casts(graph.input, "in"), _casts(graph.output, "out")
    inner = {cast.input[0]: cast.output[0] for cast in before} | {cast.output[0]: cast.input[0] for cast in after}
    for node in graph.node:
        node.input[:] = [inner.get(name, name) for name in node.input]
        node.output[:] = [inner.get(name, name) for name in node.output]
    nodes = [*before, *graph.node, *after]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    return model


def _casts(tensors: Sequence[onnx.ValueInfoProto], way: str) -> list[onnx.NodeProto]:
    """Return the Cast nodes between the model's float32 inputs ("in") or outputs and their float16 versions."""
    names = [one.name for one in tensors if one.type.tensor_type.elem_type == TensorProto.FLOAT]
    if way == "in":
        return [helper.make_node("Cast", [name], [f"{name}.half"], to=TensorProto.FLOAT16) for name in names]
    return [helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT) for name in names]


def _without_unused(model: onnx.ModelProto) -> onnx.ModelProto:
    read = {name for node in model.graph.node for name in node.input}
    kept = [one for one in model.graph.initializer if one.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model
