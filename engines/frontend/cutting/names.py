"""One scope for a whole model: tensors of the graphs inside of it, and those that passes add, have their own names."""
from __future__ import annotations

from collections.abc import Collection

import onnx

from engines.frontend.branches import made_in, rename
from engines.frontend.names import graphs_in


def in_one_scope(model: onnx.ModelProto, weights: Collection[str]) -> onnx.ModelProto:
    """A copy in which no two tensors have one name, wherever they are. weights: the model's, which it lacks."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _separate(copy.graph, {*weights, *made_in(copy.graph)})
    return copy


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Of all tensors that are made in a graph or in one inside of it."""
    return made_in(graph).union(*(names_in(inner) for node in graph.node for inner in graphs_in(node)))


def _separate(graph: onnx.GraphProto, taken: set[str]) -> None:
    for index, node in enumerate(graph.node):
        for inner in graphs_in(node):
            own = made_in(inner)
            place = node.name or next(iter(node.output), str(index))
            rename(inner, {name: free_name(f"{place}.{name}", taken | own) for name in sorted(own & taken)})
            taken |= made_in(inner)
            _separate(inner, taken)


def free_name(name: str, taken: Collection[str]) -> str:
    """The name, or the first like it that is not taken."""
    while name in taken:
        name += "'"
    return name
