"""A graph output that is a constant is made by a node, as every other: plans give what steps have written."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engines.ir.graph import Graph, Node
from engines.passes.rewriting.rewrite import fresh_name


def make_constant_outputs(graph: Graph) -> Graph:
    """The graph with an Identity in front of each output that is a constant; its other readers read the constant."""
    constant = [name for name in dict.fromkeys(graph.outputs) if graph.is_constant(name)]
    if not constant:
        return graph
    taken = {*graph.inputs, *graph.types, *graph.constants}
    names = {name: fresh_name(f"{name}.value", taken) for name in constant}
    nodes = [*(_reading(node, names) for node in graph.nodes),
             *(Node("Identity", (value,), (name,), name=name) for name, value in names.items())]
    constants = {value: graph.constants[name] for name, value in names.items()}
    types = {value: graph.types[name] for name, value in names.items()}
    others = {name: array for name, array in graph.constants.items() if name not in names}
    return replace(graph, constants=others).rebuild(nodes, constants, types)


def _reading(node: Node, names: Mapping[str, str]) -> Node:
    return replace(node, inputs=tuple(names.get(name, name) for name in node.inputs),
                   body=tuple(_reading(part, names) for part in node.body))
