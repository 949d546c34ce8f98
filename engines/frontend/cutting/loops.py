"""Remove loop invariants: carried values that a Loop never changes, as exporters pass weights."""
from __future__ import annotations

import onnx
from onnx import helper

from infer_server.engines.frontend.branches import rename
from infer_server.engines.frontend.cutting.facts import is_standard
from infer_server.engines.frontend.names import graphs_in


def read_from_around(graph: onnx.GraphProto) -> None:
    """Let the bodies of Loops read invariants by their outer names, which must be unique in the model."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "Loop" and is_standard(node):
            nodes += _without_invariants(node)
        nodes.append(node)
        for inner in graphs_in(node):
            read_from_around(inner)
    del graph.node[:]
    graph.node.extend(nodes)


def _without_invariants(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Remove the invariants from a Loop; return the Identity nodes that compute its outputs for them."""
    (body,) = graphs_in(node)
    source = {inner.output[0]: inner.input[0] for inner in body.node if inner.op_type == "Identity"}
    made = []
    for index in reversed(range(2, len(node.input))):
        outer, formal, result = node.input[index], body.input[index].name, body.output[index - 1].name
        if not outer or source.get(result, result) != formal:
            continue
        if index - 2 < len(node.output):
            if node.output[index - 2]:
                made.append(helper.make_node("Identity", [outer], [node.output[index - 2]]))
            del node.output[index - 2]
        del node.input[index], body.input[index], body.output[index - 1]
        rename(body, {formal: outer})
    return made
