"""A graph output that is a constant is made by a node, as every other: plans give what steps have written."""
from __future__ import annotations

from dataclasses import replace

from engines.ir.graph import Graph
from engines.passes.rewriting.editor import GraphEditor


def make_constant_outputs(graph: Graph) -> Graph:
    """The graph with an Identity in front of each output that is a constant; its other readers read the constant."""
    constant = {name: graph.constants[name] for name in graph.outputs if graph.is_constant(name)}
    others = {name: array for name, array in graph.constants.items() if name not in constant}
    editor = GraphEditor(replace(graph, constants=others))
    editor.nodes.extend(graph.nodes)
    for name, array in constant.items():
        editor.replace(name, by=editor.add_constant(f"{name}.value", array))
    return editor.finish()
