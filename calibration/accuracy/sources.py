"""Read from a graph what its outputs are made of: the sources of a Concat, and the tensors that feed a selection.

    sources_of(graph, "y")          # boxes and scores, and which elements of an item of y come from which
    selections(graph)["y"].tensors  # ("boxes", "scores"): what a TopK selects by, and what it selects from
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np

from infer_server.engines.errors import EngineError
from infer_server.engines.frontend.onnx_file import OnnxModel, operators_within
from infer_server.engines.ir.dtypes import is_float
from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ir.shapes import bind
from infer_server.engines.ops import op_of
from infer_server.engines.ops.reference import run_node

SELECTIONS = frozenset({"TopK", "ArgMax", "ArgMin", "NonMaxSuppression", "BoundedNonMaxSuppression", "NonZero",
                        "Unique"})
UNORDERED = frozenset({"ArgMax", "ArgMin"})
BOUNDED = frozenset({"Sigmoid", "HardSigmoid", "Softmax", "Tanh"})      # all channels share one scale by definition


@dataclass(frozen=True)
class Sources:
    """Maps each element of an item of a tensor to the tensor that it comes from.

    names       of the source tensors
    labels      index into `names`, in the shape of one item (the batch axis is 1)
    bounded     the tensor is the result of a function with a fixed range, such as Sigmoid
    """
    names: tuple[str, ...]
    labels: Array
    bounded: bool = False


def sources_of(graph: Graph, tensor: str) -> Sources:
    """Trace the elements of a tensor back through pointwise operators and moves to the inputs of each Concat.

    A tensor that no Concat takes part in has one source: the last tensor on the way back that is computed otherwise.
    The work is linear in the nodes on the way.
    """
    parts = list(parts_of(graph))
    producers = {output: node for node in parts for output in node.outputs}
    path = _transparent(graph, producers, tensor)
    known: dict[str, Sources] = {}
    for node in parts:
        if path.isdisjoint(node.outputs):
            continue
        inputs = _traced(graph, node)
        for name in inputs:
            known.setdefault(name, _whole(graph, name))
        try:
            known.update(_through(graph, node, {name: known[name] for name in inputs}))
        except EngineError:     # an operator whose reference takes no labels: its results are sources themselves
            known.update((name, _whole(graph, name)) for name in node.outputs if name)
    sources = known.get(tensor) or _whole(graph, tensor)
    last = producers.get(tensor)
    return Sources(sources.names, sources.labels, last is not None and last.op in BOUNDED)


@dataclass(frozen=True)
class Selection:
    """Dependence of an output on a selection by comparing floats (TopK, ArgMax, NonMaxSuppression, ...).

    After a selection, nearly equal elements may be swapped, so that results cannot be compared element by element.

    tensors     float tensors that enter the selection, or are gathered by its result; never graph inputs
    ordered     the output has rows in the order of the selection; False behind ArgMax and ArgMin alone
    counts      numbers of elements that are selected, where the graph knows them
    """
    tensors: tuple[str, ...] = ()
    ordered: bool = True
    counts: frozenset[int] = frozenset()


def selections(graph: Graph) -> dict[str, Selection]:
    """Find the outputs of a graph that a selection decides. Outputs that none decides are left out."""
    behind: set[str] = set()
    for node in graph.nodes:
        if behind.intersection(node.inputs) or _selects(graph, node):
            behind.update(name for name in node.outputs if name)
    return {output: _selection(graph, output, behind) for output in graph.outputs if output in behind}


def selections_of_model(model: OnnxModel) -> dict[str, Selection]:
    """Find the outputs of an ONNX model that a selection decides: for models that do not become one Graph.

    The inner tensors are not named, and a node with subgraphs counts as a selection if they contain one.
    """
    ordered: dict[str, bool] = {}
    for node in model.proto.graph.node:
        ops = SELECTIONS.intersection(operators_within(node))
        if ops or not ordered.keys().isdisjoint(node.input):
            rows = bool(ops - UNORDERED) or any(ordered.get(name, False) for name in node.input)
            ordered.update(dict.fromkeys(node.output, rows))
    return {value.name: Selection(ordered=ordered[value.name])
            for value in model.proto.graph.output if value.name in ordered}


def parts_of(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph in order, with the nodes of a fused body in the place of the fused node."""
    for node in graph.nodes:
        yield from node.body or (node,)


# ---- selections
def _selects(graph: Graph, node: Node) -> bool:
    return node.op in SELECTIONS and any(name and not graph.is_constant(name) and is_float(graph.types[name])
                                         for name in node.inputs[:2])


def _selection(graph: Graph, output: str, behind: Collection[str]) -> Selection:
    """Walk back from an output to the tensors before the selection."""
    waiting, seen = [output], {output}
    tensors: list[str] = []
    nodes: list[Node] = []
    while waiting:
        node = graph.producer[waiting.pop()]
        nodes += [node] if _selects(graph, node) else []
        for name in node.inputs:
            if not name or name in seen:
                continue
            seen.add(name)
            if name in behind:
                waiting.append(name)
            elif name in graph.producer and is_float(graph.types[name]):
                tensors.append(name)
    counts = {graph.shape(node.outputs[0])[node.attrs.get("axis", -1)] for node in nodes if node.op == "TopK"}
    return Selection(tuple(tensors), any(node.op not in UNORDERED for node in nodes),
                     frozenset(extent for extent in counts if isinstance(extent, int)))


# ---- sources
def _transparent(graph: Graph, producers: Mapping[str, Node], tensor: str) -> set[str]:
    """Name the tensors between `tensor` and its sources."""
    waiting, path = [tensor], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in path and name in producers and (inputs := _traced(graph, producers[name])):
            path.add(name)
            waiting += inputs
    return path


def _traced(graph: Graph, node: Node) -> tuple[str, ...]:
    """Name the inputs through which elements are traced back; () for a node that computes new values."""
    op = op_of(node.op)
    if op.pointwise or node.op == "Identity":
        names = node.inputs
    elif op.moves and all(graph.is_constant(name) for name in node.inputs if name and name not in op.data(node)):
        names = op.data(node)
    else:
        return ()
    inputs = tuple(name for name in dict.fromkeys(names)
                   if name and not graph.is_constant(name) and graph.types[name].dtype.kind != "b")
    return inputs if all(is_float(graph.types[name]) for name in inputs) else ()


def _whole(graph: Graph, name: str) -> Sources:
    return Sources((name,), np.broadcast_to(np.int32(0), bind(graph.shape(name), 1)))


def _through(graph: Graph, node: Node, inputs: Mapping[str, Sources]) -> dict[str, Sources]:
    """Map the sources of a node's inputs to those of its outputs."""
    if op_of(node.op).pointwise:
        output, = node.outputs
        shape = bind(graph.shape(output), 1)
        several = [one for one in inputs.values() if len(one.names) > 1]
        if not several:
            return {output: _whole(graph, output)}
        return {output: reduce(_crossed, [Sources(one.names, np.broadcast_to(one.labels, shape)) for one in several])}
    names = tuple(dict.fromkeys(name for one in inputs.values() for name in one.names))
    arrays: list[Array | None] = []
    for name in node.inputs:
        if name in inputs:
            renumbered = np.array([names.index(source) for source in inputs[name].names], np.int32)
            arrays.append(renumbered[inputs[name].labels])
        elif name and name in op_of(node.op).data(node):        # a constant part of a Concat
            arrays.append(np.full(bind(graph.shape(name), 1), -1, np.int32))
        else:
            arrays.append(graph.constants[name] if name else None)
    results = run_node(node, arrays, 1)
    return {name: Sources(names, labels) if len(names) > 1 else _whole(graph, name)
            for name, labels in zip(node.outputs, results, strict=True) if name}


def _crossed(first: Sources, second: Sources) -> Sources:
    """Combine the sources of two tensors that a pointwise operator joins: each pair that occurs is a source."""
    count = np.int32(len(second.names))
    pairs, labels = np.unique(first.labels * count + second.labels, return_inverse=True)
    names = [(first.names[pair // count], second.names[pair % count]) for pair in pairs]
    return Sources(tuple(one if one == other else f"{one} with {other}" for one, other in names),
                   labels.reshape(first.labels.shape).astype(np.int32))
