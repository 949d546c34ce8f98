"""Convert an If with small branches and a data-dependent condition to both branches and a Where (if-conversion).

    y = If(c; f(x), g(x))       ->      y = Where(c, f(x), g(x))

The model is then one graph in place of a program. This requires branches that cost less than a step of a program and
cannot fail when they are not taken: all extents are numbers, no shape depends on a value, and all operators are
defined for every value.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import onnx
from onnx import helper

from infer_server.engines.frontend.branches import is_if
from infer_server.engines.frontend.cutting.facts import (
    BY_VALUE,
    Kinds,
    holds_numbers,
    is_small,
    is_standard,
    kinds_of,
    reads,
)
from infer_server.engines.frontend.cutting.names import in_one_scope
from infer_server.engines.frontend.names import graphs_in
from infer_server.engines.frontend.onnx_file import OnnxModel
from infer_server.engines.frontend.opsets import opset_of
from infer_server.engines.ir.graph import Array

MOST_NODES = 64             # most nodes of both branches together
MOST_ELEMENTS = 4096        # most elements of a tensor that they read or compute
MOST_WEIGHTS = 1 << 18      # most elements of all constants that they read
LEAST_OPSET = 9             # the first one with Where
# Operators that are defined for all floats, and for all integers if they allow integers (but see Div and Pow).
SAFE = frozenset({
    "Abs", "Add", "Cast", "Clip", "Concat", "Constant", "Div", "Erf", "Exp", "Flatten", "Gemm", "Identity",
    "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "MatMul", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal",
    "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Relu", "Reshape", "Sigmoid", "Softmax", "Softplus", "Sqrt",
    "Sub", "Tanh", "Transpose", "Where"})
_FLOATING = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)


def with_both_branches(source: OnnxModel) -> OnnxModel:
    """Return the model with small Ifs converted; the model itself if there are none."""
    if not any(map(is_if, source.proto.graph.node)):
        return source
    if opset_of(source.proto) < LEAST_OPSET:
        return source
    model = in_one_scope(source.proto, source.weights)
    kinds, found = kinds_of(model, source.weights), False
    nodes = list(model.graph.node)
    data = _follow_data(model.graph, kinds, source.weights)
    del model.graph.node[:]
    for node in nodes:
        if is_if(node) and node.input[0] in data and _may_both_run(node, kinds, source.weights):
            model.graph.node.extend(_both(node))
            found = True
        else:
            model.graph.node.append(node)
    return source.with_proto(model) if found else source


def _both(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    branches = {attribute.name: attribute.g for attribute in node.attribute}
    taken, other = branches["then_branch"], branches["else_branch"]
    made = [helper.make_node("Constant", [], [tensor.name], value=tensor)
            for branch in (taken, other) for tensor in branch.initializer]
    made += [*taken.node, *other.node]
    for yes, no, output in zip(taken.output, other.output, node.output, strict=True):
        if output:
            made.append(helper.make_node("Where", [node.input[0], yes.name, no.name], [output], output))
    return made


def _follow_data(graph: onnx.GraphProto, kinds: Kinds, weights: Mapping[str, Array]) -> set[str]:
    """Return the tensors that depend on the values of inputs too large to be deciding inputs."""
    found = {value.name for value in graph.input if value.name not in weights and not is_small(kinds.get(value.name))}
    for node in graph.node:
        if found.intersection(reads(node)) and not (is_standard(node) and node.op_type in ("Shape", "Size")):
            found.update(node.output)
    return found


def _may_both_run(node: onnx.NodeProto, kinds: Kinds, weights: Mapping[str, Array]) -> bool:
    taken, other = graphs_in(node)
    inner = [*taken.node, *other.node]
    if len(inner) > MOST_NODES or not all(is_standard(part) and part.op_type in SAFE for part in inner):
        return False
    if not len(taken.output) == len(other.output) == len(node.output):
        return False
    own = {tensor.name: math.prod(tensor.dims) for branch in (taken, other) for tensor in branch.initializer}
    own |= {name: weights[name].size for part in inner for name in part.input if name in weights}
    known = {name: _shape(kinds.get(name)) for part in inner for name in (*part.input, *part.output)
             if name and name not in own}
    if sum(own.values()) > MOST_WEIGHTS or any(
            shape is None or math.prod(shape) > MOST_ELEMENTS for shape in known.values()):
        return False
    if _value_decides(inner, own) or not all(holds_numbers(kinds.get(name)) for name in known):
        return False
    if any(part.op_type in ("Div", "Pow") and not _floating(kinds.get(part.output[0])) for part in inner):
        return False
    condition = _shape(kinds.get(node.input[0]))
    return condition is not None and math.prod(condition) == 1 and all(
        _alike(kinds.get(yes.name), kinds.get(no.name), len(condition))
        for yes, no in zip(taken.output, other.output, strict=True))


def _value_decides(nodes: Sequence[onnx.NodeProto], constants: Collection[str]) -> bool:
    """Return True if a shape depends on a value that is no constant."""
    written = {*constants, "", *(node.output[0] for node in nodes if node.op_type == "Constant")}
    return any(name not in written for node in nodes for i in BY_VALUE.get(node.op_type, ())
               for name in node.input[i:i + 1])


def _shape(kind: onnx.TypeProto | None) -> tuple[int, ...] | None:
    """Return the shape of a tensor whose extents are all numbers, else None."""
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    extents = kind.tensor_type.shape.dim
    return tuple(d.dim_value for d in extents) if all(d.HasField("dim_value") for d in extents) else None


def _floating(kind: onnx.TypeProto | None) -> bool:
    return kind is not None and kind.tensor_type.elem_type in _FLOATING


def _alike(yes: onnx.TypeProto | None, no: onnx.TypeProto | None, least_rank: int) -> bool:
    """Return True if both types are equal and a Where with a condition of rank `least_rank` keeps their shape."""
    shape = _shape(yes)
    return (yes is not None and no is not None and shape is not None and shape == _shape(no)
            and yes.tensor_type.elem_type == no.tensor_type.elem_type and len(shape) >= least_rank)
