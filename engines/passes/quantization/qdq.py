"""Quantise a model by its own Q/DQ pairs, without calibration.

A tensor whose last operation is a FakeQuantize is stored in 8 bits if all tensors that share memory with it are; a
contraction computes in int8 if its input and its weights are quantised. Other tensors stay float, and a FakeQuantize
inside a kernel rounds there. So numbers are rounded exactly where the model rounds them.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from infer_server.engines.ir.dtypes import FLOAT
from infer_server.engines.ir.graph import Graph, Node, QParams, TensorType
from infer_server.engines.ir.grid import grid_params
from infer_server.engines.ops import Stored, op_of
from infer_server.engines.passes.quantization.kept import kept_nodes
from infer_server.engines.passes.quantization.offsets import with_offsets_apart
from infer_server.engines.passes.quantization.quantize import contractions, in_int8, sums_fit
from infer_server.engines.passes.quantization.storage import classes, stored_by
from infer_server.engines.passes.rewriting.editor import merged_origin
from infer_server.engines.passes.rewriting.facts import output_axis
from infer_server.engines.passes.rewriting.notes import Note, note

FAKE = "FakeQuantize"


def is_quantised(graph: Graph) -> bool:
    """Return True if the model has FakeQuantize nodes, that is Q/DQ pairs."""
    return any(part.op == FAKE for node in graph.nodes for part in node.body or (node,))


def quantize_by_fake_quantize(graph: Graph, keep_float: Collection[str] = (), log: list[Note] | None = None) -> Graph:
    """Return an optimised graph with its edges and contractions quantised by its FakeQuantize nodes.

    Parameters
    ----------
    graph : Graph
        An optimised graph with FakeQuantize nodes.
    keep_float : collection of str
        Names of ONNX nodes, or patterns of them (kept.py), that compute in float.
    log : list of Note, optional
        Receives the contractions with quantised inputs that stay float, and why.
    """
    keep_float = kept_nodes(graph, keep_float)
    known = {node.outputs[0]: _params(last) for node in graph.nodes
             if (last := (node.body or (node,))[-1]).op == FAKE and _fits_uint8(last)}
    graph = _stored_so(graph, known)
    graph, split = with_offsets_apart(graph, [
        node for node in contractions(graph, keep_float) if _input_type(graph, node, known) is not None
        and grid_params(graph.constants[node.anchor.inputs[1]], output_axis(node)) is None])
    required: dict[int, TensorType] = {}
    weights: dict[tuple[str, ...], QParams] = {}
    for node in contractions(graph, keep_float):
        weight, axis = graph.constants[node.anchor.inputs[1]], output_axis(node)
        if (kind := _input_type(graph, node, known)) is None:
            continue
        quant = split.get(node.outputs) or grid_params(weight, axis)
        if quant is None or not sums_fit(weight, axis):
            note(log, node, "quantize", "stays float: its weights are not quantised to 8 bits")
            continue
        required[id(node)], weights[node.outputs] = kind, quant
    return in_int8(graph, required, weights, keep_float)


def _fits_uint8(node: Node) -> bool:
    return (node.attrs["low"], node.attrs["high"]) == (0, 255)


def _params(node: Node) -> QParams:
    return QParams((node.attrs["scale"],), (node.attrs["zero_point"],), "uint8")


def _input_type(graph: Graph, node: Node, known: Mapping[str, QParams]) -> TensorType | None:
    """Return the quantised type of a contraction's input, as it is stored or as a FakeQuantize rounded it, or None."""
    name = source = node.anchor.inputs[0]
    while (quant := graph.types[source].quant or known.get(source)) is None:
        maker = graph.producer.get(source)
        if maker is None or maker.body or not op_of(maker.op).moves or len(op_of(maker.op).data(maker)) != 1:
            return None
        source = op_of(maker.op).data(maker)[0]
    return replace(graph.types[name], quant=quant)


# ---- tensors
def _stored_so(graph: Graph, known: Mapping[str, QParams]) -> Graph:
    """Return the graph with each class of tensors stored in 8 bits if all its producers round to one grid.

    The classes are computed on a graph without the FakeQuantizes, where a Transpose of an attention's result is a view.
    """
    types: dict[str, TensorType] = {}
    stored = graph.rebuild(_rounding_when_stored(graph, known))
    for group in classes(stored):
        made = {known.get(name) for name in group if stored_by(stored, stored.producer[name]) is not Stored.ALIKE}
        quant = next(iter(made), None)
        if quant is not None and len(made) == 1:
            types |= {name: replace(graph.types[name], quant=quant) for name in group}
    return graph.rebuild(_rounding_when_stored(graph, types), types=types)


def _rounding_when_stored(graph: Graph, stored: Collection[str]) -> list[Node]:
    """Return the nodes without the FakeQuantizes of the tensors `stored`, since storing them rounds."""
    merged: dict[int, Node] = {}         # id of a node -> its replacement
    gone: set[int] = set()
    for node in graph.nodes:
        *before, last = node.body or (node,)
        if last.op != FAKE or node.outputs[0] not in stored:
            continue
        if before:
            merged[id(node)] = _ending_with(node, before)
        elif (maker := _sole_maker(graph, node)) is not None:
            gone.add(id(node))
            merged[id(maker)] = replace(maker, outputs=node.outputs, origin=merged_origin((maker, node)))
        else:
            merged[id(node)] = replace(node, op="Identity", attrs={})
    return [merged.get(id(node), node) for node in graph.nodes if id(node) not in gone]


def _ending_with(node: Node, parts: Sequence[Node]) -> Node:
    """Return the node with these parts as its body, the last of which takes the node's outputs."""
    last = replace(parts[-1], outputs=node.outputs)
    return replace(node.with_body((*parts[:-1], last)), origin=node.origin, name=node.name)


def _sole_maker(graph: Graph, node: Node) -> Node | None:
    """Return the producer of the node's input if nothing else reads it and its kernel can store any type, else None."""
    name = node.inputs[0]
    maker = graph.producer.get(name)
    alone = len(graph.consumers[name]) == 1 and name not in graph.outputs
    if maker is None or maker.body or len(maker.outputs) > 1 or not alone or graph.types[name].dtype != FLOAT:
        return None
    return maker if stored_by(graph, maker) is Stored.CONVERTED and maker.op not in ("Identity", "Cast") else None
