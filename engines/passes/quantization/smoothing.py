"""Scale the channels of tensors inside existing kernels, so that all channels use the steps of a common scale.

    (x / s) (s W) = x W

    products            SmoothQuant (Xiao et al. 2023, arXiv 2211.10438): a few channels of transformers are far larger
                        than the others; they move into the weights
    convolutions        cross-layer equalisation (Nagel et al. 2019, arXiv 1906.04721, section 4.1): a depthwise layer
                        has a scale for each channel, so that its input can be scaled at no cost

The division is folded into the scale and shift of the layer norm that computes x, or is one Mul in the body of
another producer; other readers of x, such as residual sums, multiply by s in their bodies. Clip(x, 0, 6) / s needs no
bound for each channel if 6 / s is not below the range of the scaled tensor: storing a byte saturates there.

A max pool, or a concatenation along the channels, carries scaled channels on to its readers (`carried`).

infer_server.calibration.smoothing chooses s per tensor name, so a graph of the same model at other shapes is scaled
equally.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops import op_of
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import NORMS, is_pointwise, is_weighted

Floats = NDArray[np.float64]

MOST_READERS = 4        # most readers of a weight: smoothing copies it for each
SMOOTHED = ".smoothed"  # suffix of the constants by which tensors are divided or multiplied


def scalable(graph: Graph) -> tuple[str, ...]:
    """Return the tensors of an optimised float graph whose channels can be scaled inside existing kernels.

    They are computed by a layer norm, a heavy node or a pointwise one, and read by products with constant matrices, by
    convolutions and by pointwise operations only, directly or behind nodes that carry channels. Tensors whose weights
    more than MOST_READERS nodes share are left out, so that the plan holds such weights once.
    """
    allowed = _allowed(graph)
    return tuple(node.outputs[0] for node in graph.nodes if _scales_its_output(graph, node)
                 and node.outputs[0] in allowed)


def smoothable(graph: Graph) -> tuple[str, ...]:
    """Return the tensors of `scalable` that only products and pointwise operations read."""
    return tuple(tensor for tensor in scalable(graph) if not _is_convolved(graph, tensor))


def equalisable(graph: Graph) -> tuple[str, ...]:
    """Return the tensors of `scalable` that a convolution, or a node that carries channels, reads."""
    return tuple(tensor for tensor in scalable(graph) if _is_convolved(graph, tensor))


def carried(graph: Graph, factors: Mapping[str, Iterable[float]]) -> dict[str, Floats]:
    """Return the factors [C] of tensors with those of what max pools and concatenations make of them."""
    known = {name: np.asarray(tuple(s), np.float64) for name, s in factors.items()}
    for node in graph.nodes:
        if _carries(graph, node) and any(name in known for name in node.inputs):
            known[node.outputs[0]] = np.concatenate([
                known[name] if name in known else np.ones(_channels(graph, name)) for name in node.inputs])
    return known


def weights_behind(graph: Graph, tensor: str) -> list[Array]:
    """Return the constant matrices [inputs, outputs] that a tensor is multiplied by."""
    return [_rows(node.anchor, graph.constants[node.anchor.inputs[1]])
            for node in graph.consumers[tensor] if _multiplies(graph, node, tensor)]


def weight_shares(graph: Graph) -> dict[str, Floats]:
    """Return the largest weight of each channel relative to the scale of an output that reads it, float64 [C].

    For computed tensors that weights multiply, directly or behind nodes that carry channels.
    """
    shares: dict[str, Floats] = {}
    for name in (output for node in reversed(graph.nodes) for output in node.outputs):
        parts = [part for reader in graph.consumers[name] for part in _shares_of(graph, reader, name, shares)]
        if parts:
            shares[name] = np.asarray(np.max(parts, axis=0), np.float64)
    return shares


def smoothed(graph: Graph, factors: Mapping[str, Iterable[float]]) -> Graph:
    """Return an equivalent graph in which each tensor of `factors` is divided by its factors, one per channel."""
    return _Smoothing(graph, carried(graph, factors)).run()


def is_smoothed(graph: Graph, tensor: str) -> bool:
    """Return True if `smoothed` has divided this tensor of the graph."""
    sources = [tensor]
    while sources:
        name = sources.pop()
        node = graph.producer.get(name)
        if node is not None and _carries(graph, node):
            sources += dict.fromkeys(node.inputs)
        elif node is not None and _divides(node, name):
            return True
    return False


# ---- conditions
def _rows(product: Node, weight: Array) -> Array:
    """Return the weights as [inputs, outputs]; its own inverse."""
    return weight.T if product.op == "Gemm" and product.attrs.get("transB") else weight


def _by_input(anchor: Node, weight: Array) -> Array:
    """Return weights as [groups, outputs, inputs of a group, taps]."""
    if anchor.op == "Conv":
        groups = anchor.attrs.get("group", 1)
        return weight.reshape(groups, len(weight) // groups, weight.shape[1], -1)
    return _rows(anchor, weight).T[None, :, :, None]


def _multiplies(graph: Graph, node: Node, tensor: str) -> bool:
    """Return True if the node multiplies the tensor by a constant matrix, or convolves it with constant weights."""
    anchor = node.anchor
    if anchor.inputs[:1] != (tensor,) or tensor in anchor.inputs[1:] or not is_weighted(anchor):
        return False
    if not graph.is_constant(anchor.inputs[1]):
        return False
    if anchor.op == "Conv":
        return bool(anchor.attrs.get("channels_last"))
    return not anchor.attrs.get("transA") and graph.constants[anchor.inputs[1]].ndim == 2


def _divides(node: Node, tensor: str) -> bool:
    """Return True if constants that `smoothed` added divide the node's output."""
    if node.op in NORMS:
        return any(SMOOTHED in name for name in node.inputs[1:])
    return any(name.startswith(f"{tensor}{SMOOTHED}") for part in node.body or (node,) for name in part.inputs)


def _shares_of(graph: Graph, reader: Node, tensor: str, shares: Mapping[str, Floats]) -> Iterator[Floats]:
    """Yield the shares that one reader's weights, or those behind it, have of a tensor's channels."""
    if _multiplies(graph, reader, tensor):
        by_output = _by_input(reader.anchor, np.abs(graph.constants[reader.anchor.inputs[1]]))   # [groups, O, C, taps]
        peaks = by_output.max(axis=3).astype(np.float64)
        rows = np.maximum(peaks.max(axis=2, keepdims=True), np.finfo(np.float32).tiny)
        yield (peaks / rows).max(axis=1).reshape(-1)
    elif _carries(graph, reader) and reader.outputs[0] in shares:
        first = 0
        for name in reader.inputs:
            last = first + _channels(graph, name)
            if name == tensor:
                yield shares[reader.outputs[0]][first:last]
            first = last


def _is_convolved(graph: Graph, tensor: str) -> bool:
    return any(_carries(graph, node) or node.anchor.op == "Conv" and node.anchor.inputs[0] == tensor
               for node in graph.consumers[tensor])


def _carries(graph: Graph, node: Node) -> bool:
    """Return True for a max pool of channels in the last axis, and for a concatenation along the last axis."""
    if node.op == "Concat":
        return bool(node.attrs["axis"] == len(graph.types[node.outputs[0]].shape) - 1)
    return node.op == "MaxPool" and bool(node.attrs.get("channels_last")) and len(node.outputs) == 1


def _channels(graph: Graph, tensor: str) -> int:
    return as_int(graph.types[tensor].shape[-1])


def _scales_its_output(graph: Graph, node: Node) -> bool:
    if len(node.outputs) != 1 or graph.types[node.outputs[0]].dtype != np.float32:
        return False
    if node.op in NORMS:
        return all(graph.is_constant(name) and graph.constants[name].ndim == 1 for name in node.inputs[1:] if name)
    return op_of(node.anchor.op).anchor or is_pointwise(node.anchor)


def _allowed(graph: Graph) -> set[str]:
    """Return the computed tensors that are no outputs and whose readers allow to scale their channels."""
    allowed: set[str] = set()
    for node in reversed(graph.nodes):
        inner = [name for name in node.outputs if name not in graph.outputs]
        allowed.update(name for name in inner if _readers_allow(graph, name, allowed))
    return allowed


def _readers_allow(graph: Graph, tensor: str, allowed: Collection[str]) -> bool:
    """Return True if all readers allow to scale a tensor. allowed: that of later tensors."""
    readers = graph.consumers[tensor]
    products = [node for node in readers if _multiplies(graph, node, tensor)]
    carriers = {node.outputs for node in readers if _carries(graph, node) and node.outputs[0] in allowed}
    if any(len(graph.consumers[node.anchor.inputs[1]]) > MOST_READERS for node in products):
        return False
    return bool(products or carriers) and all(
        node.outputs in carriers or _multiplies(graph, node, tensor) or is_pointwise(node.anchor)
        or node.op == "Fused" and tensor not in node.anchor.inputs for node in readers)


# ---- rewriting
class _Smoothing(GraphEditor):
    """Scaling of tensors: divides each in its producer, and multiplies by the factors in its readers."""

    def __init__(self, graph: Graph, factors: Mapping[str, Floats]) -> None:
        super().__init__(graph)
        self.factors = factors

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if not _carries(self.graph, node):
                for tensor in self._scaled(node.inputs):
                    node = self._reading(node, tensor)
                for tensor in self._scaled(node.outputs):
                    node = self._making(node, tensor)
            self.nodes.append(node)
        return self.finish()

    def _scaled(self, names: Iterable[str]) -> list[str]:
        return [name for name in dict.fromkeys(names) if name in self.factors]

    def _constant(self, name: str, array: Array) -> str:
        return self.add_constant(f"{name}{SMOOTHED}", np.ascontiguousarray(array, np.float32))

    def _inner(self, tensor: str) -> str:
        return self.add_tensor(f"{tensor}.unsmoothed", self.graph.types[tensor])

    def _making(self, node: Node, tensor: str) -> Node:
        factors = self.factors[tensor]
        if node.op in NORMS:
            constants = [self._constant(name, self.graph.constants[name] / factors) if name else ""
                         for name in node.inputs[1:]]
            return replace(node, inputs=(node.inputs[0], *constants))
        *before, last = node.body or (node,)
        share, inner = self._constant(tensor, 1 / factors), self._inner(tensor)
        if last.op == "Relu" and before:        # a Relu stays last: it marks the tensor as never negative
            scale = Node("Mul", (last.inputs[0], share), (inner,), name=inner)
            return node.with_body([*before, scale, replace(last, inputs=(inner,))])
        scale = Node("Mul", (inner, share), (tensor,), name=tensor)
        return node.with_body([*before, replace(last, outputs=(inner,)), scale])

    def _reading(self, node: Node, tensor: str) -> Node:
        parts, first = list(node.body or (node,)), 0        # first: the part from which on the tensor is restored
        if not is_pointwise(parts[0]):
            first = 1
        if _multiplies(self.graph, node, tensor):
            anchor, source = parts[0], parts[0].inputs[1]
            name = self._constant(source, self._multiplied(anchor, self.graph.constants[source], self.factors[tensor]))
            parts[0] = replace(anchor, inputs=(anchor.inputs[0], name, *anchor.inputs[2:]))
        if any(tensor in part.inputs for part in parts[first:]):
            inner = self._inner(tensor)
            factors = self._constant(tensor, self.factors[tensor])
            restored = Node("Mul", (tensor, factors), (inner,), name=inner)
            parts[first:] = [restored, *(replace(part, inputs=tuple(
                inner if name == tensor else name for name in part.inputs)) for part in parts[first:])]
        return node.with_body(parts)

    @staticmethod
    def _multiplied(anchor: Node, weight: Array, factors: Floats) -> Array:
        """Return weights whose inputs are multiplied by the factors [C]."""
        if anchor.op == "Conv":
            rows = _by_input(anchor, weight)
            return (rows * factors.reshape(len(rows), 1, -1, 1)).reshape(weight.shape)
        return _rows(anchor, _rows(anchor, weight) * factors[:, None])
