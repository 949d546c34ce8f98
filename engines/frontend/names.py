"""The names in a model file: text that can be read, and each tensor made once."""
from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from engines.errors import ModelError


def check_names(model: str, graph: onnx.GraphProto) -> None:
    """Raises ModelError: a name that is no UTF-8, a tensor that is made twice, a graph without outputs."""
    _refuse_unreadable(model, graph)
    if not graph.output:
        raise ModelError(f"{model} has no outputs")
    made: dict[str, str] = {}
    for name, maker in _made(graph):
        if name in made:
            raise ModelError(f"{model}: tensor '{name}' is made twice: by {made[name]} and by {maker}")
        made[name] = maker


def _made(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """(tensor, what makes it); a constant that is the default of an input is that input."""
    inputs = {value.name for value in graph.input}
    yield from ((value.name, "an input") for value in graph.input)
    yield from ((tensor.name, "a constant") for tensor in graph.initializer if tensor.name not in inputs)
    yield from ((sparse.values.name, "a sparse constant") for sparse in graph.sparse_initializer)
    for node in graph.node:
        yield from ((name, f"node '{node.name}' ({node.op_type})") for name in node.output if name)


def _refuse_unreadable(model: str, graph: onnx.GraphProto) -> None:
    """The protobuf runtime hands text that is no UTF-8 over as bytes, which no table knows."""
    for node in graph.node:
        texts = (node.name, node.op_type, node.domain, *node.input, *node.output, *(a.name for a in node.attribute))
        _refuse_bytes(model, f"node '{node.name}' ({node.op_type})", texts)
    values = [value.name for value in (*graph.input, *graph.output)] + [tensor.name for tensor in graph.initializer]
    extents = (d.dim_param for value in graph.input for d in value.type.tensor_type.shape.dim)
    _refuse_bytes(model, "an input, output or constant", (graph.name, *values, *extents))


def _refuse_bytes(model: str, where: str, texts: Iterable[str | bytes]) -> None:
    if broken := next((text for text in texts if isinstance(text, bytes)), None):
        raise ModelError(f"{model}: {where} has a name that is no UTF-8 text: {broken!r}; the file is damaged")
