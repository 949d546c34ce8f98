"""Compute uint8 weights with a zero point other than 128 in int8, with the offset as a second contraction.

    w = s[o] * (k + r[o])                   k int8, r a whole number per output channel
    x * w = x * (s[o] * k) + s[o] * r[o] * (x * 1)

x * 1 is an int8 contraction by ones with one output channel, the sum over a row or a window, which all output channels
share. With groups, each output channel has its own.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from infer_server.engines.ir.dtypes import FLOAT
from infer_server.engines.ir.graph import Array, Graph, Node, QParams, TensorType
from infer_server.engines.ir.grid import offset_grid
from infer_server.engines.ops import op_of
from infer_server.engines.passes.quantization.storage import reading
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import output_axis


def with_offsets_apart(graph: Graph, nodes: Iterable[Node]) -> tuple[Graph, dict[tuple[str, ...], QParams]]:
    """Split contractions by weights on an offset grid into one by int8 weights and one by ones.

    Parameters
    ----------
    graph : Graph
        An optimised graph.
    nodes : iterable of Node
        Contractions of the graph by constant weights; those without an offset grid stay.

    Returns
    -------
    Graph
        The rewritten graph.
    dict of tuple of str to QParams
        The quantisation of the new weights, by the outputs of the nodes that read them.
    """
    chosen = {id(node): found for node in nodes if node.anchor.op != "ConvTranspose"
              and (found := offset_grid(graph.constants[node.anchor.inputs[1]], output_axis(node))) is not None}
    if not chosen:
        return graph, {}
    splitter = _OffsetSplitter(graph)
    for node in graph.nodes:
        splitter.nodes.append(splitter.split(node, *chosen[id(node)]) if id(node) in chosen else node)
    return splitter.finish(), splitter.weights


class _OffsetSplitter(GraphEditor):
    """State of the pass: quantisation of weights by the outputs of their reader, and the products by ones so far."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.weights: dict[tuple[str, ...], QParams] = {}
        self.totals: dict[tuple[object, ...], str] = {}

    def split(self, node: Node, scales: Array, rest: Array) -> Node:
        """Return the node with its anchor on int8 weights, plus the offset's term, whose nodes are added before it."""
        anchor, axis, (y,) = node.anchor, output_axis(node), node.outputs
        weight = self.graph.constants[anchor.inputs[1]]
        along = [-1 if i == axis else 1 for i in range(weight.ndim)]
        taken = (scales * rest).astype(np.float32)
        less = self.add_constant(f"{anchor.inputs[1]}.less", weight - taken.reshape(along))
        self.weights[node.outputs] = QParams(tuple(map(float, scales)), (0,) * len(scales), "int8", axis)
        inner = TensorType(FLOAT, self.graph.shape(anchor.outputs[0]))
        first = replace(reading(anchor, {anchor.inputs[1]: less}), outputs=(self.add_tensor(f"{y}.by_int8", inner),))
        if anchor.attrs.get("group", 1) > 1:
            share, parts = self._by_ones(node, axis, weight.shape, taken), []
        else:
            total = self._by_ones(node, axis, [1 if i == axis else d for i, d in enumerate(weight.shape)], np.ones(1))
            factor = self.add_constant(f"{y}.offsets", taken[:1] if (taken == taken[0]).all() else taken)
            share = self.add_tensor(f"{y}.share", inner)
            self.types[share], = op_of("Mul").infer(made := Node("Mul", (total, factor), (share,), name=share), [
                self.type(total), self.type(factor)], [None, None])
            parts = [made]
        whole = anchor.outputs[0]
        parts.append(Node("Add", (first.outputs[0], share), (whole,), name=whole))
        return node.with_body((first, *parts, *node.body[1:]))

    def _by_ones(self, node: Node, axis: int, shape: Iterable[int], factors: Array) -> str:
        """Return the result of the anchor by weights that equal `factors` in each output channel."""
        anchor, shape = node.anchor, tuple(shape)
        key = (anchor.op, anchor.inputs[0], str(sorted(anchor.attrs.items())), shape, factors.tobytes())
        if key not in self.totals:
            scales = np.where(factors == 0, 1, np.abs(factors)).astype(np.float32)
            along = [-1 if i == axis else 1 for i in range(len(shape))]
            ones = self.add_constant(f"{anchor.outputs[0]}.ones", np.broadcast_to(
                factors.astype(np.float32).reshape(along), shape).copy())
            self.totals[key] = made = self.add(f"{anchor.outputs[0]}.total", anchor.op, (anchor.inputs[0], ones),
                                               anchor.attrs, node.origin)
            self.types[made] = replace(self.types[made], quant=None)
            self.weights[(made,)] = QParams(tuple(map(float, scales)), (0,) * len(scales), "int8", axis)
        return self.totals[key]
