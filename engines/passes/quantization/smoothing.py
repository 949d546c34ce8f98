"""SmoothQuant (Xiao et al. 2023, arXiv 2211.10438): move outlier channels from activations into weights.

    (x / s) (s W) = x W

Tensors of transformers have a few channels far larger than the others, which leaves the others few steps of a common
scale. The division is folded into the scale and shift of the layer norm that computes x, or is one Mul in the body of
another producer; readers of x other than products, such as residual sums, multiply by s in their bodies.

infer_server.calibration.smoothing chooses s per tensor name, so a graph of the same model at other shapes is smoothed
equally.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ops import op_of
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import NORMS, is_pointwise, is_weighted

Floats = NDArray[np.float64]

MOST_READERS = 4        # most readers of a weight: smoothing copies it for each
SMOOTHED = ".smoothed"  # suffix of the constants by which tensors are divided or multiplied


def smoothable(graph: Graph) -> tuple[str, ...]:
    """Return the tensors of an optimised float graph whose channels can be scaled inside existing kernels.

    They are computed by a layer norm, a heavy node or a pointwise one, and read by products with constant matrices and
    by pointwise operations only. Tensors whose weights more than MOST_READERS nodes share are left out, so that the
    plan holds such weights once.
    """
    return tuple(node.outputs[0] for node in graph.nodes if _scales_its_output(graph, node)
                 and node.outputs[0] not in graph.outputs and _readers_allow(graph, node.outputs[0]))


def weights_behind(graph: Graph, tensor: str) -> list[Array]:
    """Return the constant matrices [inputs, outputs] that a tensor is multiplied by."""
    return [_rows(node.anchor, graph.constants[node.anchor.inputs[1]])
            for node in graph.consumers[tensor] if _multiplies(graph, node, tensor)]


def smoothed(graph: Graph, factors: Mapping[str, Iterable[float]]) -> Graph:
    """Return an equivalent graph in which each tensor of `factors` is divided by its factors, one per channel."""
    for tensor, values in factors.items():
        graph = _Smoothing(graph, tensor, np.asarray(tuple(values), np.float64)).run()
    return graph


def is_smoothed(graph: Graph, tensor: str) -> bool:
    """Return True if `smoothed` has divided this tensor of the graph."""
    node = graph.producer[tensor]
    if node.op in NORMS:
        return any(SMOOTHED in name for name in node.inputs[1:])
    return any(name.startswith(f"{tensor}{SMOOTHED}") for part in node.body or (node,) for name in part.inputs)


# ---- conditions
def _rows(product: Node, weight: Array) -> Array:
    """Return the weights as [inputs, outputs]; its own inverse."""
    return weight.T if product.op == "Gemm" and product.attrs.get("transB") else weight


def _multiplies(graph: Graph, node: Node, tensor: str) -> bool:
    """Return True if the node multiplies the tensor by a constant matrix."""
    anchor = node.anchor
    return (is_weighted(anchor) and anchor.inputs[0] == tensor and not anchor.attrs.get("transA")
            and graph.is_constant(anchor.inputs[1]) and graph.constants[anchor.inputs[1]].ndim == 2)


def _scales_its_output(graph: Graph, node: Node) -> bool:
    if len(node.outputs) != 1 or graph.types[node.outputs[0]].dtype != np.float32:
        return False
    if node.op in NORMS:
        return all(graph.is_constant(name) and graph.constants[name].ndim == 1 for name in node.inputs[1:] if name)
    return op_of(node.anchor.op).anchor or is_pointwise(node.anchor)


def _readers_allow(graph: Graph, tensor: str) -> bool:
    readers = graph.consumers[tensor]
    products = [node for node in readers if _multiplies(graph, node, tensor)]
    if any(len(graph.consumers[node.anchor.inputs[1]]) > MOST_READERS for node in products):
        return False
    return bool(products) and all(
        _multiplies(graph, node, tensor) or node.anchor.inputs[0] != tensor and node.op == "Fused" or is_pointwise(node)
        for node in readers)


# ---- rewriting
class _Smoothing(GraphEditor):
    """Smoothing of one tensor: divides it in its producer, and multiplies by the factors in its readers."""

    def __init__(self, graph: Graph, tensor: str, factors: Floats) -> None:
        super().__init__(graph)
        self.tensor, self.factors = tensor, factors

    def run(self) -> Graph:
        readers = {id(node) for node in self.graph.consumers[self.tensor]}
        self.nodes = [self._making(node) if self.tensor in node.outputs else
                      self._reading(node) if id(node) in readers else node for node in self.graph.nodes]
        return self.finish()

    def _constant(self, name: str, array: Array) -> str:
        return self.add_constant(f"{name}{SMOOTHED}", np.ascontiguousarray(array, np.float32))

    def _inner(self) -> str:
        return self.add_tensor(f"{self.tensor}.unsmoothed", self.graph.types[self.tensor])

    def _making(self, node: Node) -> Node:
        if node.op in NORMS:
            constants = [self._constant(name, self.graph.constants[name] / self.factors) if name else ""
                         for name in node.inputs[1:]]
            return replace(node, inputs=(node.inputs[0], *constants))
        *before, last = node.body or (node,)
        share, inner = self._constant(self.tensor, 1 / self.factors), self._inner()
        if last.op == "Relu" and before:        # a Relu stays last: it marks the tensor as never negative
            scale = Node("Mul", (last.inputs[0], share), (inner,), name=inner)
            return node.with_body([*before, scale, replace(last, inputs=(inner,))])
        scale = Node("Mul", (inner, share), (self.tensor,), name=self.tensor)
        return node.with_body([*before, replace(last, outputs=(inner,)), scale])

    def _reading(self, node: Node) -> Node:
        parts, first = list(node.body or (node,)), 0        # first: the part from which on the tensor is restored
        if not is_pointwise(parts[0]):
            first = 1
        if _multiplies(self.graph, node, self.tensor):
            anchor, source = parts[0], parts[0].inputs[1]
            rows = _rows(anchor, self.graph.constants[source]) * self.factors[:, None]
            name = self._constant(source, _rows(anchor, rows))
            parts[0] = replace(anchor, inputs=(anchor.inputs[0], name, *anchor.inputs[2:]))
        if any(self.tensor in part.inputs for part in parts[first:]):
            inner = self._inner()
            factors = self._constant(self.tensor, self.factors)
            restored = Node("Mul", (self.tensor, factors), (inner,), name=inner)
            parts[first:] = [restored, *(replace(part, inputs=tuple(
                inner if name == self.tensor else name for name in part.inputs)) for part in parts[first:])]
        return node.with_body(parts)
