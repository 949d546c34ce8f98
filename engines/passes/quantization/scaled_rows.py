"""Quantisation by row: int8 products whose input has a scale for each row, computed at run time.

    x W = (x / s) W * s             s = max |x| / 127 of each row of x, as the rows of ScaledRows

x / s is stored in 8 bits with a scale of 1. One scale for the whole tensor, from calibration, leaves few steps to rows
(tokens) of small numbers. Convolutions sum over several rows of pixels and are not changed.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from infer_server.engines.ir.graph import Graph, Node
from infer_server.engines.passes.quantization.kept import kept_nodes
from infer_server.engines.passes.quantization.quantize import contractions
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import NORMS


def scalable_rows(graph: Graph) -> tuple[str, ...]:
    """Return the tensors of an optimised float graph that products read and that norms compute.

    Norms store float32, so that scaling their rows replaces the conversion to 8 bits.
    """
    read = {node.anchor.inputs[0] for node in contractions(graph, ()) if _multiplies_rows(node)}
    return tuple(node.outputs[0] for node in graph.nodes if node.op in NORMS and node.outputs[0] in read)


def with_scaled_rows(graph: Graph, tensors: Collection[str], keep_float: Collection[str] = ()) -> Graph:
    """Return an equivalent float graph in which products read these tensors divided by a scale for each row.

    Parameters
    ----------
    graph : Graph
        An optimised float graph.
    tensors : collection of str
        Names of tensors; those that the graph lacks are ignored.
    keep_float : collection of str
        ONNX nodes that compute in float, whose inputs stay as they are.
    """
    editor = GraphEditor(graph)
    read = {node.outputs: node.anchor.inputs[0] for node in contractions(graph, kept_nodes(graph, keep_float))
            if node.anchor.inputs[0] in tensors and _multiplies_rows(node)}
    wanted = set(read.values())
    scaled = {name: _scaled(editor, name) for name in graph.inputs if name in wanted}
    for node in graph.nodes:
        editor.nodes.append(_by_scaled(editor, node, *scaled[read[node.outputs]]) if node.outputs in read else node)
        scaled |= {name: _scaled(editor, name) for name in node.outputs if name in wanted}
    return editor.finish()


def _multiplies_rows(node: Node) -> bool:
    """Return True for a product whose rows of x each make a row of y."""
    attrs = node.anchor.attrs
    return node.anchor.op == "MatMul" or node.anchor.op == "Gemm" and not attrs.get("transA") and (
        attrs.get("alpha", 1) == attrs.get("beta", 1) == 1)


def _scaled(editor: GraphEditor, x: str) -> tuple[str, str]:
    """Add a ScaledRows node; return the names of its results."""
    kind = editor.type(x)
    rows = editor.add_tensor(f"{x}.scaled", kind)
    scales = editor.add_tensor(f"{x}.scales", replace(kind, shape=(*kind.shape[:-1], 1)))
    editor.nodes.append(Node("ScaledRows", (x,), (rows, scales), name=rows))
    return rows, scales


def _by_scaled(editor: GraphEditor, node: Node, rows: str, scales: str) -> Node:
    """Return the product of scaled rows, multiplied by their scales before its bias is added."""
    anchor, (_, weight, *bias) = node.anchor, node.anchor.inputs
    y, kind = anchor.outputs[0], editor.type(anchor.outputs[0])
    names = [*(editor.add_tensor(f"{y}.{part}", kind) for part in ("of_scaled", "unbiased")[:1 + any(bias)]), y]
    parts = [replace(anchor, inputs=(rows, weight), outputs=(names[0],)),
             Node("Mul", (names[0], scales), (names[1],), name=f"{y}.by_scales")]
    if any(bias):
        parts.append(Node("Add", (names[1], bias[0]), (y,), name=f"{y}.biased"))
    return node.with_body([*parts, *node.body[1:]])
