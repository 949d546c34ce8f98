"""Find the edges that may be stored in another type than float32, and the classes that share one type.

Tensors that share memory (the parts of a Concat or Split) or whose elements are only moved or selected are one class,
with one type and one scale. A class stays float32 if any of its tensors is an input or output of the graph, or is an
operand of a node without kernels on stored types. Tensors that an int8 build leaves in float32 (floats.py) belong to
no class: conversions connect them with the others (joins.py).
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.ir.dtypes import FLOAT, is_float
from infer_server.engines.ir.graph import Graph, Node, QParams, TensorType
from infer_server.engines.ops import LayoutOp, Stored, op_of
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import (
    ATTENTION,
    is_view_of_input,
    is_view_of_output,
    is_weighted,
    pads_with_zeros,
)

_OF_VOLUMES = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")


def float_edges(graph: Graph) -> set[str]:
    """Return the float32 outputs of all nodes."""
    return {name for node in graph.nodes for name in node.outputs if name and graph.types[name].dtype == FLOAT}


def classes(graph: Graph, floats: Collection[str] = ()) -> list[tuple[str, ...]]:
    """Return the classes of edges that may change their type, each in order of the graph.

    floats: edges that stay float32, which are in no class.
    """
    edges = [name for node in graph.nodes for name in node.outputs if name]
    parent = {name: name for name in (*graph.inputs, *edges)}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    fixed = {name for name in parent if graph.types[name].dtype != FLOAT}.union(graph.inputs, graph.outputs, floats)
    for node in graph.nodes:
        touched = [name for name in (*node.inputs, *node.outputs) if name in parent]
        stored = stored_by(graph, node)
        if stored is Stored.FLOAT:
            fixed.update(touched)
        elif stored is Stored.ALIKE:
            data = [name for name in touched if graph.types[name].dtype == FLOAT and name not in floats]
            for name in data[1:]:
                parent[root(name)] = root(data[0])
            if any(graph.is_constant(name) and graph.types[name].dtype == FLOAT for name in node.inputs):
                fixed.update(touched)               # a constant part of a Concat, a table of embeddings
        elif node.op == ATTENTION:
            fixed.update(name for name in node.inputs[3:] if name in parent)        # the mask
        elif node.op in ("Recurrence", "ScaledRows"):
            fixed.update(name for name in touched if name != node.outputs[0])
    still = {root(name) for name in fixed}
    members: dict[str, list[str]] = {}
    for name in edges:
        if root(name) not in still:
            members.setdefault(root(name), []).append(name)
    return [tuple(names) for names in members.values()]


def stored_by(graph: Graph, node: Node) -> Stored:
    """Return the operator's storage rule for a node, with exceptions.

    Stored.FLOAT: nodes that only generic loop nests compute, a Pad by other numbers than zero, and Casts of integers.
    Stored.ALIKE: a Transpose that copies nothing.
    """
    if _by_nests(graph, node.anchor):
        return Stored.FLOAT
    if node.op == "Pad" and not pads_with_zeros(node) or node.op == "Cast" and not all(
            is_float(graph.types[name]) for name in (*node.inputs, *node.outputs)):
        return Stored.FLOAT
    if node.op == "Transpose" and (is_view_of_input(graph, node) or is_view_of_output(graph, node)):
        return Stored.ALIKE
    return Stored.CONVERTED if node.body else op_of(node.op).stored


def _by_nests(graph: Graph, node: Node) -> bool:
    """Return True for an operator on images that has no dedicated kernel: on channels-first images, or on volumes."""
    if not issubclass(op_of(node.op), LayoutOp):
        return False
    return not node.attrs.get("channels_last") or len(graph.shape(node.inputs[0])) > 4 and node.op not in _OF_VOLUMES


def is_image(graph: Graph, name: str) -> bool:
    """Return True if a tensor has more than one pixel per item, so that its size matters."""
    return len(shape := graph.shape(name)) > 2 and any(extent != 1 for extent in shape[1:-1])


def computes_by(graph: Graph, node: Node) -> bool:
    """Return True for a contraction by constant weights that kernels run in every precision."""
    anchor = node.anchor
    if not is_weighted(node) or not graph.is_constant(anchor.inputs[1]):
        return False
    if not graph.constants[anchor.inputs[1]].size:
        return False
    if anchor.op in ("Conv", "ConvTranspose"):
        return not _by_nests(graph, anchor)
    return graph.constants[anchor.inputs[1]].ndim == 2


def with_conversions(graph: Graph, types: Mapping[int, TensorType]) -> Graph:
    """Insert an Identity before each node in `types`, by id, whose data input is stored in another type."""
    editor = GraphEditor(graph)
    converted: dict[tuple[str, np.dtype[Any], QParams | None], str] = {}
    for node in graph.nodes:
        type_ = types.get(id(node))
        source = node.anchor.inputs[0] if node.anchor.inputs else ""
        if type_ is not None and graph.types[source] != type_:
            key = source, type_.dtype, type_.quant
            if key not in converted:
                stored = type_.quant.dtype if type_.quant else type_.dtype
                name = editor.add_tensor(f"{source}.{stored}", type_)
                converted[key] = editor.make(name, "Identity", [source])
            node = reading(node, {source: converted[key]})
        editor.nodes.append(node)
    return editor.finish()


def reading(node: Node, names: Mapping[str, str]) -> Node:
    """Return the node with its anchor's inputs renamed; later nodes of a body keep theirs."""
    anchor = replace(node.anchor, inputs=tuple(names.get(name, name) for name in node.anchor.inputs))
    return node.with_body((anchor, *node.body[1:]))
