"""Check the names in a model file: valid UTF-8, one producer per tensor, and no undefined reads in subgraphs."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import onnx

from infer_server.engines.errors import ModelError


def check_names(model: str, graph: onnx.GraphProto) -> None:
    """Raise ModelError for a name that is not UTF-8, a tensor with two producers, or a graph without outputs."""
    _refuse_unreadable(model, graph)
    if not graph.output:
        raise ModelError(f"{model} has no outputs")
    producers: dict[str, str] = {}
    for name, maker in _definitions(graph):
        if name in producers:
            raise ModelError(f"{model}: tensor '{name}' is produced twice: by {producers[name]} and by {maker}")
        producers[name] = maker


def check_branches(model: str, graph: onnx.GraphProto) -> None:
    """Raise ModelError if a subgraph reads a tensor that neither it nor a graph around it defines."""
    _refuse_unmade(model, graph, {name for name, _ in _definitions(graph)})


def graphs_in(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the subgraphs of a node: branches of an If, the body of a Loop or Scan."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def nodes_in(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in graphs_in(node):
            yield from nodes_in(graph.node)


def _refuse_unmade(model: str, graph: onnx.GraphProto, known: Set[str]) -> None:
    """Check the reads of all subgraphs, including branches never taken. The importer checks those of the main graph."""
    for node in graph.node:
        for inner in graphs_in(node):
            inside = known | {name for name, _ in _definitions(inner)}
            for reader in inner.node:
                if missing := next((name for name in reader.input if name and name not in inside), None):
                    raise ModelError(f"{model}: {_describe(reader)} in graph '{inner.name}' of {_describe(node)} reads "
                                     f"'{missing}', which nothing produces")
            _refuse_unmade(model, inner, inside)


def _describe(node: onnx.NodeProto) -> str:
    return f"node '{node.name or next(iter(node.output), '')}' ({node.op_type})"


def _definitions(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Yield (tensor, description of its producer); an initializer that is the default of an input is left out."""
    inputs = {value.name for value in graph.input}
    yield from ((value.name, "an input") for value in graph.input)
    yield from ((tensor.name, "a constant") for tensor in graph.initializer if tensor.name not in inputs)
    yield from ((sparse.values.name, "a sparse constant") for sparse in graph.sparse_initializer)
    for node in graph.node:
        yield from ((name, f"node '{node.name}' ({node.op_type})") for name in node.output if name)


def _refuse_unreadable(model: str, graph: onnx.GraphProto) -> None:
    """Raise ModelError for a name that is not UTF-8, which the protobuf runtime returns as bytes."""
    for node in graph.node:
        texts = (node.name, node.op_type, node.domain, *node.input, *node.output, *(a.name for a in node.attribute))
        _refuse_bytes(model, f"node '{node.name}' ({node.op_type})", texts)
    values = [value.name for value in (*graph.input, *graph.output)] + [tensor.name for tensor in graph.initializer]
    extents = (d.dim_param for value in graph.input for d in value.type.tensor_type.shape.dim)
    _refuse_bytes(model, "an input, output or constant", (graph.name, *values, *extents))


def _refuse_bytes(model: str, where: str, texts: Iterable[str | bytes]) -> None:
    if broken := next((text for text in texts if isinstance(text, bytes)), None):
        raise ModelError(f"{model}: {where} has a name that is not valid UTF-8: {broken!r}; the file is damaged")
