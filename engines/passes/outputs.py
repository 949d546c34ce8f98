"""Rewrite the outputs of a graph: give constant outputs a node, and add inner tensors as watched outputs."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from infer_server.engines.ir.graph import Graph
from infer_server.engines.passes.rewriting.editor import GraphEditor


def make_constant_outputs(graph: Graph) -> Graph:
    """Insert an Identity in front of each output that is a constant: a plan returns only what a step wrote."""
    constant = {name: graph.constants[name] for name in graph.outputs if graph.is_constant(name)}
    others = {name: array for name, array in graph.constants.items() if name not in constant}
    editor = GraphEditor(replace(graph, constants=others))
    editor.nodes.extend(graph.nodes)
    for name, array in constant.items():
        editor.replace(name, by=editor.add_constant(f"{name}.value", array))
    return editor.finish()


def show_in_float(graph: Graph, tensors: Iterable[str]) -> Graph:
    """Add inner tensors to the outputs of a graph whose stored types are decided, as watched outputs.

    A tensor that is stored quantised is converted by an Identity. The output of tensor t is called `shown_name(t)`;
    tensors that the graph lacks are left out.
    """
    editor, names = GraphEditor(graph), []
    editor.nodes.extend(graph.nodes)
    for tensor in dict.fromkeys(tensors):
        if tensor in graph.producer and tensor not in graph.outputs:
            type_ = replace(graph.types[tensor], quant=None)
            names.append(editor.make(editor.add_tensor(shown_name(tensor), type_), "Identity", [tensor]))
    shown = replace(graph, outputs=(*graph.outputs, *names), watched=tuple(names))
    return shown.rebuild(editor.nodes, editor.constants, {**graph.types, **editor.types})


def shown_name(tensor: str) -> str:
    """Name the output by which `show_in_float` shows a tensor."""
    return f"{tensor}.shown"
