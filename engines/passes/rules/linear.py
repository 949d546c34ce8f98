"""What Conv, ConvTranspose and Gemm have in common: constant weights, one bias per output channel.

    (W x + b) * k + c = (k W) x + (k b + c)         k, c: one number per output channel
"""
from __future__ import annotations

import numpy as np

from engines.ir.graph import Array, Graph, Node
from engines.passes.rewriting.rewrite import Draft, Match, No

LINEAR = "Conv ConvTranspose Gemm"


def weights_are_constant(graph: Graph, node: Node) -> bool | No:
    """Whether the node is a linear map whose constants may be rewritten: Gemm in canonical form only."""
    for name in node.inputs[1:]:
        if name and not graph.is_constant(name):
            return No(f"'{name}' is not a constant")
    if node.op == "Gemm" and not is_canonical(graph, node):
        return No("a Gemm with a bias per row")
    return True


def is_canonical(graph: Graph, node: Node) -> bool:
    """Gemm(x, W [N, K], b [N]) = x W' + b"""
    attrs = node.attrs
    plain = attrs.get("transB") == 1 and not attrs.get("transA") and attrs.get("alpha", 1) == attrs.get("beta", 1) == 1
    return plain and all(graph.shape(name) == graph.shape(node.inputs[1])[:1] for name in node.inputs[2:] if name)


def output_channels(graph: Graph, node: Node) -> int:
    weight = graph.constants[node.inputs[1]]
    return int(weight.shape[1] * node.attrs.get("group", 1) if node.op == "ConvTranspose" else weight.shape[0])


def scale_outputs(node: Node, weight: Array, factor: Array) -> Array:
    """`weight` with the weights of output channel o multiplied by factor[o], in float64, and rounded once."""
    if node.op == "ConvTranspose":      # [Cin, Cout / groups, ...]: a block of rows for each group
        groups = node.attrs.get("group", 1)
        blocks, factors = weight.reshape(groups, -1, *weight.shape[1:]), (groups, 1, -1, *(1,) * (weight.ndim - 2))
    else:
        blocks, factors = weight, (-1, *(1,) * (weight.ndim - 1))
    scaled = np.empty_like(blocks)      # told where to put its results, numpy widens a piece at a time
    np.multiply(blocks, factor.reshape(factors), out=scaled, dtype=np.float64, casting="same_kind")
    return scaled.reshape(weight.shape)


def bias_of(graph: Graph, node: Node) -> Array:
    """float64 [channels]; zeros where the node has none."""
    if len(node.inputs) > 2 and node.inputs[2]:
        return graph.constants[node.inputs[2]].astype(np.float64).reshape(-1)
    return np.zeros(output_channels(graph, node))


def finish_scaled(match: Match, draft: Draft, node: Node, factor: Array | None, offset: Array) -> None:
    """Finishes with node(x) * factor + offset as one node; both float64 [channels]."""
    weight = match.graph.constants[node.inputs[1]]
    bias = bias_of(match.graph, node)
    name = node.inputs[1]
    if factor is not None:
        name = draft.constant("weight", scale_outputs(node, weight, factor))
        bias = bias * factor
    bias_name = draft.constant("bias", (bias + offset).astype(weight.dtype))
    draft.finish(node.op, [node.inputs[0], name, bias_name], node.attrs)
