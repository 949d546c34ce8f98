"""One scope for a whole model: tensors of the graphs inside of it get names that no other tensor has."""
from __future__ import annotations

import onnx

from engines.frontend.branches import made_in, rename
from engines.frontend.names import graphs_in


def in_one_scope(graph: onnx.GraphProto) -> onnx.GraphProto:
    """A copy in which no two tensors have one name, wherever they are."""
    copy = onnx.GraphProto()
    copy.CopyFrom(graph)
    _separate(copy, made_in(copy))
    return copy


def _separate(graph: onnx.GraphProto, taken: set[str]) -> None:
    for index, node in enumerate(graph.node):
        for inner in graphs_in(node):
            own = made_in(inner)
            place = node.name or next(iter(node.output), str(index))
            rename(inner, {name: _free(f"{place}.{name}", taken | own) for name in sorted(own & taken)})
            taken |= made_in(inner)
            _separate(inner, taken)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "'"
    return name
