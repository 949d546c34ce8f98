"""Inlining of If nodes with a constant condition: the branch that is taken replaces the node."""
from __future__ import annotations

from collections.abc import Mapping

import onnx

from infer_server.engines.errors import GraphError, UnknownTensorError
from infer_server.engines.ir.graph import Array


def is_if(node: onnx.NodeProto) -> bool:
    return node.op_type == "If" and node.domain in ("", "ai.onnx")


def branch_taken(node: onnx.NodeProto, condition: Array | None) -> onnx.GraphProto:
    """Return the branch that an If takes for a condition.

    Raises
    ------
    UnknownTensorError
        If the condition is not known at import.
    GraphError
        If the condition is not a single bool, or the branch is missing or has another number of outputs.
    """
    if condition is None or condition.dtype == object:
        raise UnknownTensorError(f"the condition '{node.input[0]}' is not known at import", node.input)
    if condition.dtype.kind != "b" or condition.size != 1:
        raise GraphError(f"the condition is {condition.dtype}{list(condition.shape)}, but has to be a single bool")
    wanted = "then_branch" if condition.item() else "else_branch"
    branches = {attribute.name: attribute for attribute in node.attribute}
    if wanted not in branches or branches[wanted].type != onnx.AttributeProto.GRAPH:
        raise GraphError(f"the attribute {wanted} is missing")
    branch = branches[wanted].g
    if len(branch.output) != len(node.output):
        raise GraphError(f"{wanted} has {len(branch.output)} outputs, but the node has {len(node.output)}")
    return branch


def defined_in(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors that a graph defines itself: its initializers, inputs and node outputs."""
    return {*(tensor.name for tensor in graph.initializer), *(value.name for value in graph.input),
            *(name for node in graph.node for name in node.output if name)}


def with_names(graph: onnx.GraphProto, names: Mapping[str, str]) -> onnx.GraphProto:
    """Return a copy of a graph with tensors renamed, in its subgraphs too."""
    copy = onnx.GraphProto()
    copy.CopyFrom(graph)
    rename(copy, names)
    return copy


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename tensors of a graph in place, in its subgraphs too."""
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                rename(inner, names)
