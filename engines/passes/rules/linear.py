"""Helpers of rules on linear layers: Conv, ConvTranspose and Gemm, with one bias per output channel.

    (W x + b) * k + c = (k W) x + (k b + c)         k, c: one number per output channel
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, No

LINEAR = "Conv ConvTranspose Gemm"


def weights_are_constant(graph: Graph, node: Node) -> bool | No:
    """Return True if the weights and bias are constants that may be rewritten, and a Gemm is in canonical form."""
    for name in node.inputs[1:]:
        if name and not graph.is_constant(name):
            return No(f"'{name}' is not a constant")
    if node.op == "Gemm" and not is_canonical(graph, node):
        return No("a Gemm with a bias per row")
    return True


def is_canonical(graph: Graph, node: Node) -> bool:
    """Return True for a Gemm of the form x W' + b, with W [N, K] and b [N]."""
    attrs = node.attrs
    plain = attrs.get("transB") == 1 and not attrs.get("transA") and attrs.get("alpha", 1) == attrs.get("beta", 1) == 1
    return plain and all(graph.shape(name) == graph.shape(node.inputs[1])[:1] for name in node.inputs[2:] if name)


def output_channels(graph: Graph, node: Node) -> int:
    weight = graph.constants[node.inputs[1]]
    return int(weight.shape[1] * node.attrs.get("group", 1) if node.op == "ConvTranspose" else weight.shape[0])


def scale_outputs(node: Node, weight: Array, factor: Array) -> Array:
    """Return `weight` with output channel o multiplied by factor[o], computed in float64 and rounded once."""
    if node.op == "ConvTranspose":      # [Cin, Cout / groups, ...]: a block of rows for each group
        groups = node.attrs.get("group", 1)
        blocks, factors = weight.reshape(groups, -1, *weight.shape[1:]), (groups, 1, -1, *(1,) * (weight.ndim - 2))
    else:
        blocks, factors = weight, (-1, *(1,) * (weight.ndim - 1))
    scaled = np.empty_like(blocks)      # with `out`, NumPy converts to float64 in small blocks
    np.multiply(blocks, factor.reshape(factors), out=scaled, dtype=np.float64, casting="same_kind")
    return scaled.reshape(weight.shape)


def bias_of(graph: Graph, node: Node) -> Array:
    """Return the node's bias as float64 [channels]; zeros if it has none."""
    if len(node.inputs) > 2 and node.inputs[2]:
        return graph.constants[node.inputs[2]].astype(np.float64).reshape(-1)
    return np.zeros(output_channels(graph, node))


def finish_scaled(match: Match, draft: Draft, node: Node, factor: Array | None, offset: Array) -> None:
    """Finish with node(x) * factor + offset as one node; both are float64 [channels], and no factor means 1."""
    weight = match.graph.constants[node.inputs[1]]
    bias = bias_of(match.graph, node)
    name = node.inputs[1]
    if factor is not None:
        name = draft.constant("weight", scale_outputs(node, weight, factor))
        bias = bias * factor
    bias_name = draft.constant("bias", (bias + offset).astype(weight.dtype))
    draft.finish(node.op, [node.inputs[0], name, bias_name], node.attrs)
