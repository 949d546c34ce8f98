"""Tensors that an INT8 build leaves in float32 whatever their ranges are.

    results         tensors that lead to no convolution or matrix product: 8 bits would save little memory traffic and
                    lose precision of the outputs (boxes and scores after a detector's last layers)
    norms           x - mean(x) and its square: the quantised square of a small deviation is 0
    kept nodes      results, and inputs, of the nodes that the user keeps in float (kept.py)
"""
from __future__ import annotations

from collections.abc import Collection

from infer_server.engines.ir.graph import Graph, Node
from infer_server.engines.ops import Stored, op_of
from infer_server.engines.passes.quantization.storage import computes_by, float_edges, stored_by
from infer_server.engines.passes.rewriting.facts import ATTENTION, is_pointwise, is_weighted, scalar

SELECTIONS = ("Split", "Slice", "Gather")       # operators whose outputs hold a part of their input
_MEANS = ("GlobalAveragePool", "AveragePool", "ReduceMean", "ReduceSum")


def float_tensors(graph: Graph) -> frozenset[str]:
    """Return the tensors that stay float32 by the structure of the graph alone."""
    return frozenset(_results(graph) | _inside_norms(graph))


def kept_tensors(graph: Graph, kept: Collection[str]) -> frozenset[str]:
    """Return the tensors that stay float32 for nodes with these ONNX names to compute in float.

    These are the results of the nodes, and the inputs that no other node reads. The result of a contraction that only
    int8 contractions read is no such tensor: it is rounded on the way into them in any case.
    """
    nodes = {id(node): node for node in graph.nodes if not set(node.origin).isdisjoint(kept)}
    tensors: set[str] = set()
    for node in nodes.values():
        tensors.update(name for name in node.outputs if not (
            is_weighted(node) and _only_contracted(graph, name, nodes)))
        tensors.update(name for name in node.inputs if name in graph.producer and name not in graph.outputs
                       and all(id(reader) in nodes for reader in graph.consumers[name]))
    return frozenset(tensors & float_edges(graph))


def closed(graph: Graph, floats: Collection[str]) -> frozenset[str]:
    """Extend float32 tensors to those connected by moves, which saves conversions.

    Parts of a float tensor stay float32, and so do tensors that are only moved into float tensors, as by a Concat.
    """
    edges, result = float_edges(graph), set(floats)
    movers = [node for node in graph.nodes if stored_by(graph, node) is Stored.ALIKE]
    mover_ids = {id(node) for node in movers}

    def parts_follow() -> None:
        for node in movers:
            if node.op in SELECTIONS and node.inputs[0] in result:
                result.update(edges.intersection(node.outputs))

    parts_follow()
    for node in reversed(movers):
        for name in edges.intersection(node.inputs) - result:
            if name not in graph.outputs and all(
                    id(reader) in mover_ids and result.issuperset(reader.outputs) for reader in graph.consumers[name]):
                result.add(name)
    parts_follow()
    return frozenset(result)


# ---- results
def _leads_to_contraction(graph: Graph) -> set[str]:
    """Return the tensors from which a convolution or a matrix product can be reached."""
    leading: set[str] = set()
    for node in reversed(graph.nodes):
        if is_weighted(node) or node.anchor.op in (ATTENTION, "Recurrence") or not leading.isdisjoint(node.outputs):
            leading.update(node.inputs)
    return leading


def leads_to_output(graph: Graph) -> set[str]:
    """Return the tensors that lead to graph outputs through moves and pointwise operations alone."""
    leading = set(graph.outputs)
    for node in reversed(graph.nodes):
        moves = is_pointwise(node.anchor) or op_of(node.anchor.op).moves or stored_by(graph, node) is Stored.ALIKE
        if moves and not leading.isdisjoint(node.outputs):
            leading.update(node.inputs)
    return leading


def _results(graph: Graph) -> set[str]:
    """Return the edges after the last contractions, except tensors that are only moved from earlier ones."""
    leading, results = _leads_to_contraction(graph), set[str]()
    edges = float_edges(graph)
    for node in graph.nodes:
        names = edges.intersection(node.outputs) - leading
        if stored_by(graph, node) is Stored.ALIKE:
            sources = edges.intersection(node.inputs)
            names = names if results.issuperset(sources) else set()
        results |= names
    return results


# ---- norms
def _inside_norms(graph: Graph) -> set[str]:
    """Return deviations from a mean and the squares that a variance, or an L2 norm, is the mean or the sum of."""
    inside: set[str] = set()
    for node in graph.nodes:
        if node.anchor.op in _MEANS:
            inside.update(_squares(graph, node.anchor.inputs[0]))
    return inside & float_edges(graph)


def _squares(graph: Graph, name: str) -> set[str]:
    """Return the tensors between a deviation and the mean of its square; none if no square is averaged."""
    moved = {name}
    while (maker := graph.producer.get(name)) is not None and not maker.body and op_of(maker.op).moves \
            and len(op_of(maker.op).data(maker)) == 1:
        name, = op_of(maker.op).data(maker)
        moved.add(name)
    squares = [part for part in maker.body or (maker,) if _is_square(graph, part)] if maker is not None else []
    if maker is None or not squares or not is_pointwise(maker.anchor):
        return set()
    deviations = {part.inputs[0] for part in squares}
    return moved | {name for name in deviations if _is_deviation(graph, name)}


def _is_square(graph: Graph, part: Node) -> bool:
    if part.op == "Mul":
        return part.inputs[0] == part.inputs[1]
    return part.op == "Pow" and scalar(graph, part.inputs[1]) == 2


def _is_deviation(graph: Graph, name: str) -> bool:
    """Return True if the tensor is a difference from, or a sum with, a run-time tensor that is broadcast to it."""
    maker = graph.producer.get(name)
    return maker is not None and any(
        part.op in ("Sub", "Add") and any(
            other in graph.producer and graph.shape(other) != graph.shape(name) for other in part.inputs)
        for part in maker.body or (maker,))


# ---- kept nodes
def _only_contracted(graph: Graph, name: str, kept: Collection[int]) -> bool:
    """Return True if only contractions outside the kept nodes read the tensor, as their first input."""
    readers = graph.consumers[name]
    return bool(readers) and name not in graph.outputs and all(
        id(reader) not in kept and computes_by(graph, reader) and reader.anchor.inputs[0] == name
        and not any(name in part.inputs for part in reader.body[1:]) for reader in readers)
