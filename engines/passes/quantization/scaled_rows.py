"""Quantisation by row: int8 products whose input has a scale for each row, computed at run time.

    x W = (x / s) W * s             s = max |x| / 127 of each row of x, as the rows of ScaledRows

x / s is stored in 8 bits with a scale of 1. One scale for the whole tensor, from calibration, leaves few steps to rows
(tokens) of small numbers. Convolutions sum over several rows of pixels and are not changed.

Activations have a least value, GELU -0.17, so that a symmetric scale would spend half of the steps on numbers that do
not occur. Their rows are shifted, and a constant that is added to the product makes up for it:

    x W = ((x + c) / s) W * s - c W             s = max (x + c) / 255
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ir.rounding import UNSIGNED_STEPS
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.passes.quantization.kept import kept_nodes
from infer_server.engines.passes.quantization.quantize import contractions, nearest_steps, weight_params
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import ATTENTION, NORMS, output_axis

LEAST = {"Relu": 0.0, "Gelu": -0.1701, "Swish": -0.2785, "HardSwish": -0.375}       # lower bounds of activations


def scalable_rows(graph: Graph) -> tuple[str, ...]:
    """Return the inputs of products in an optimised float graph that norms, activations or attentions compute."""
    read = {node.anchor.inputs[0] for node in contractions(graph, ()) if _multiplies_rows(node)}
    return tuple(node.outputs[0] for node in graph.nodes if node.outputs[0] in read and (
        node.op in NORMS or _shift(graph, node) is not None or _source(graph, node).op == ATTENTION))


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
    read = {node.outputs: node.anchor.inputs[0] for node in contractions(graph, kept_nodes(graph, keep_float))
            if node.anchor.inputs[0] in tensors and _multiplies_rows(node)}
    return _Scaling(graph, read).run()


@dataclass(frozen=True)
class _Scaled:
    """Names of the rows and scales of a tensor, and the constant that was added to its rows, float64 [K]."""
    rows: str
    scales: str
    shift: Array | None = None


class _Scaling(GraphEditor):
    """Rewriting of products, by their outputs in `read`, whose inputs there are scaled."""

    def __init__(self, graph: Graph, read: Mapping[tuple[str, ...], str]) -> None:
        super().__init__(graph)
        self._read, self._wanted = read, set(read.values())
        self._scaled: dict[str, _Scaled] = {}

    def run(self) -> Graph:
        for name in self.graph.inputs:
            self._scale(name)
        for node in self.graph.nodes:
            if node.outputs in self._read:
                node = self._by_scaled(node, self._scaled[self._read[node.outputs]])
            shift = _shift(self.graph, node) if node.outputs[0] in self._wanted else None
            if shift is not None and self._only_products_read(node.outputs[0]):
                self._scale_shifted(node, shift)
            else:
                self.nodes.append(node)
                for name in node.outputs:
                    self._scale(name)
        return self.finish()

    def _only_products_read(self, name: str) -> bool:
        return name not in self.graph.outputs and all(
            node.outputs in self._read and self.graph.constants[node.anchor.inputs[1]].ndim == 2
            and name not in node.inputs[1:] for node in self.graph.consumers[name])

    def _scale(self, x: str) -> None:
        """Scale the rows of a tensor if products are to read them."""
        if x in self._wanted:
            self._scaled[x] = _Scaled(*self._add_scaled_rows(x, x))

    def _scale_shifted(self, node: Node, shift: Array) -> None:
        """Add the shift to the rows of a node's output, then scale them."""
        x = node.outputs[0]
        if not shift.any():
            self.nodes.append(node)
            self._scaled[x] = _Scaled(*self._add_scaled_rows(x, x, steps=UNSIGNED_STEPS))
            return
        plain, shifted = (self.add_tensor(f"{x}.{part}", self.type(x)) for part in ("unshifted", "shifted"))
        *before, last = node.body or (node,)
        constant = self.add_constant(f"{x}.shift", shift.astype(np.float32))
        body = [*before, replace(last, outputs=(plain,)), Node("Add", (plain, constant), (shifted,), name=shifted)]
        self.nodes.append(replace(node, outputs=(shifted,)).with_body(body))
        self._scaled[x] = _Scaled(*self._add_scaled_rows(x, shifted, steps=UNSIGNED_STEPS), shift)

    def _add_scaled_rows(self, x: str, source: str, **attrs: int) -> tuple[str, str]:
        """Add a ScaledRows node; return the names of its results."""
        kind = self.type(x)
        rows = self.add_tensor(f"{x}.scaled", kind)
        scales = self.add_tensor(f"{x}.scales", replace(kind, shape=(*kind.shape[:-1], 1)))
        self.nodes.append(Node("ScaledRows", (source,), (rows, scales), attrs, name=rows))
        return rows, scales

    def _by_scaled(self, node: Node, x: _Scaled) -> Node:
        """Return the product of scaled rows, multiplied by their scales before constants are added."""
        anchor, (_, weight, *bias) = node.anchor, node.anchor.inputs
        y, kind = anchor.outputs[0], self.type(anchor.outputs[0])
        added = [name for name in bias if name]
        if x.shift is not None:
            added.insert(0, self.add_constant(f"{y}.unshift", self._unshift(anchor, x.shift)))
        labels = ("of_scaled", "by_scales", "shifted_back")[:1 + len(added)]
        names = [*(self.add_tensor(f"{y}.{label}", kind) for label in labels), y]
        parts = [replace(anchor, inputs=(x.rows, weight), outputs=(names[0],)),
                 Node("Mul", (names[0], x.scales), (names[1],), name=f"{y}.rescale")]
        parts += [Node("Add", (before, constant), (after,), name=f"{before}.add")
                  for before, constant, after in zip(names[1:-1], added, names[2:], strict=True)]
        return node.with_body([*parts, *node.body[1:]])

    def _unshift(self, product: Node, shift: Array) -> Array:
        """Return minus the shift times the weights as int8 represents them, float32 [N]."""
        weight = self.graph.constants[product.inputs[1]]
        axis = output_axis(product)
        quant = weight_params(weight, axis)
        steps = nearest_steps(weight, quant).astype(np.float64)
        return np.asarray(-np.tensordot(shift, steps, (0, 1 - axis)) * np.array(quant.scale), np.float32)


def _multiplies_rows(node: Node) -> bool:
    """Return True for a product whose rows of x each make a row of y."""
    attrs = node.anchor.attrs
    return node.anchor.op == "MatMul" or node.anchor.op == "Gemm" and not attrs.get("transA") and (
        attrs.get("alpha", 1) == attrs.get("beta", 1) == 1)


def _shift(graph: Graph, node: Node) -> Array | None:
    """Return what makes a node's rows positive if added, float64 [K]; None unless it ends in an activation of LEAST.

    Smoothing multiplies the activation by a constant for each channel.
    """
    *_, before, last = (None, *(node.body or (node,)))
    width = (as_int(graph.types[node.outputs[0]].shape[-1]),)
    if last.op in LEAST:
        return np.full(width, -LEAST[last.op])
    factors = graph.constants.get(last.inputs[1]) if last.op == "Mul" else None
    if before is None or before.op not in LEAST or factors is None or last.inputs[0] != before.outputs[0]:
        return None
    return -LEAST[before.op] * np.broadcast_to(factors, width) if factors.shape == width and (
        factors.min() >= 0) else None


def _source(graph: Graph, node: Node) -> Node:
    """Return the node whose output a chain of Reshape and Transpose ends in `node`."""
    while node.op in ("Reshape", "Transpose") and node.inputs[0] in graph.producer:
        node = graph.producer[node.inputs[0]]
    return node
