"""Make tensor names unique in a whole model, subgraphs and added tensors included."""
from __future__ import annotations

from collections.abc import Collection

import onnx

from infer_server.engines.frontend.branches import defined_in, rename
from infer_server.engines.frontend.names import graphs_in


def in_one_scope(model: onnx.ModelProto, weights: Collection[str]) -> onnx.ModelProto:
    """Return a copy with unique tensor names. `weights`: names of the initializers, which the model itself lacks."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _separate(copy.graph, {*weights, *defined_in(copy.graph)})
    return copy


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Return the names of all tensors that a graph and its subgraphs define."""
    return defined_in(graph).union(*(names_in(inner) for node in graph.node for inner in graphs_in(node)))


def _separate(graph: onnx.GraphProto, taken: set[str]) -> None:
    for index, node in enumerate(graph.node):
        for inner in graphs_in(node):
            own = defined_in(inner)
            place = node.name or next(iter(node.output), str(index))
            rename(inner, {name: free_name(f"{place}.{name}", taken | own) for name in sorted(own & taken)})
            taken |= defined_in(inner)
            _separate(inner, taken)


def free_name(name: str, taken: Collection[str]) -> str:
    """Return the name, with apostrophes appended while it is taken."""
    while name in taken:
        name += "'"
    return name
