"""Fuse attention that is written as products into one node, whose kernel never stores the scores.

    MatMul(Softmax(MatMul(q, k') * scale + mask), v) = ScaledDotProductAttention(q, k, v, mask)

The scale may be a Mul anywhere between q or k and the Softmax. The mask may be an Add, or a Where that replaces scores
by a constant of -1e4 or less, before or after the scale. A Where becomes an Add of HIDDEN, which is so large that the
sum in float32 does not depend on the score:

    softmax(Where(hidden, c, s)) = softmax(s + (HIDDEN if hidden else 0))

Hidden keys have a weight of 0 if the query sees other keys, and equal weights if it sees none: the result is then the
mean of the values, whatever c and the scores are. The two sides are equal for visible scores above c + 104, since
exp(-104) is 0 in float32. Numbers added to hidden scores later would be lost, so such a pattern is refused.

Transposes that split heads stay separate nodes: a backend reads through them with strides.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from infer_server.engines.ir.deferred import combined, elementwise
from infer_server.engines.ir.dtypes import FLOAT
from infer_server.engines.ir.graph import Array, Dim, Graph, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.passes.layout.permutations import axis_groups
from infer_server.engines.passes.rewriting.dataflow import Walk, dataflow
from infer_server.engines.passes.rewriting.editor import GraphEditor, merged_origin
from infer_server.engines.passes.rewriting.facts import ATTENTION, reader, scalar
from infer_server.engines.passes.rewriting.notes import Note, note

MOST_BYTES = 2 << 20        # limit of one head's keys and values in float32: they are packed on a thread's stack
MASKING = -1e4              # a Where hides a score if it replaces it by this or less
ABSORBING = -1e31           # in float32, adding a usual score or another mask's number to it changes nothing
HIDDEN = float(np.finfo(np.float32).min)


class _NotFusible(Exception):
    """Raised, with the reason, for a pattern that looks like attention and cannot be fused."""


@dataclass
class _ScorePath:
    """Nodes, scale factor and masks between the product of q and k' and its Softmax."""
    nodes: list[Node] = field(default_factory=list)
    factor: float = 1.0
    masks: list[_Mask] = field(default_factory=list)


@dataclass(frozen=True)
class _Mask:
    """Mask of scores of a shape: a tensor to add `factor` times, or a condition under which `value` replaces scores."""
    name: str
    shape: tuple[Dim, ...]
    factor: float = 1.0
    value: float | None = None
    holds: bool = True                  # whether scores are replaced where the condition is true

    @property
    def hidden(self) -> float:
        """The number that is added to a score in place of replacing it by the value."""
        assert self.value is not None
        if self.value > ABSORBING:
            return HIDDEN
        return self.value if self.value >= HIDDEN else -math.inf        # below the range of float32


def fuse_attention(graph: Graph, log: list[Note] | None = None) -> Graph:
    """Return the graph with each attention that a kernel can run as one node; `log` says why others are not fused."""
    fusion = _AttentionFusion(graph)
    for node in graph.nodes:
        softmax = graph.producer.get(node.inputs[0]) if node.op == "MatMul" else None
        if softmax is not None and softmax.op == "Softmax" and not graph.is_constant(node.inputs[1]):
            try:
                fusion.attention(node, softmax)
                continue
            except _NotFusible as reason:
                note(log, node, "fuse_attention", str(reason))
        fusion.nodes.append(node)
    return fusion.finish()


class _AttentionFusion(GraphEditor):
    def attention(self, node: Node, softmax: Node) -> None:
        graph = self.graph
        rank = len(graph.shape(softmax.outputs[0]))
        if softmax.attrs.get("axis", -1) % rank != rank - 1:
            raise _NotFusible("its softmax is not along the keys")
        path = _scores(graph, node, softmax)
        q, k_turned, v = *path.nodes[-1].inputs, node.inputs[1]
        ranks = {len(graph.shape(name)) for name in (q, k_turned, v)}
        if len(ranks) > 1 or min(ranks) < 3:
            raise _NotFusible("its factors do not have equally many axes, at least three")
        extents = [*graph.shape(q)[-2:], *graph.shape(v)[-2:]]
        if not all(isinstance(extent, int) for extent in extents):
            raise _NotFusible("its number of tokens depends on the batch")
        _, depth, keys, width = map(as_int, extents)
        if 4 * keys * (depth + width) > MOST_BYTES:
            raise _NotFusible(f"keys and values of {4 * keys * (depth + width)} bytes a head do not fit a cache")
        scale = path.factor
        base = node.outputs[0]
        factors = []
        for name, turn in ((q, False), (k_turned, True), (v, False)):
            name, factor = self._unscaled(name, base) if name != v else (name, 1.0)
            scale *= factor
            factors.append(self._turned(name, base) if turn else name)
        origin = merged_origin([*reversed(path.nodes), softmax, node])
        inputs = (*factors, *self._mask(path, base))
        self.nodes.append(Node(ATTENTION, inputs, node.outputs, {"scale": scale}, node.name, origin))

    # ---- new nodes
    def _turned(self, name: str, base: str) -> str:
        rank = len(self.shape(name))
        return self.add(f"{base}.keys", "Transpose", [name], {"perm": (*range(rank - 2), rank - 1, rank - 2)})

    def _unscaled(self, name: str, base: str) -> tuple[str, float]:
        """Return the tensor without its multiplications by scalars, keeping views, and the product of the scalars."""
        graph, factor, source = self.graph, 1.0, name
        views: list[Node] = []              # Transposes and Reshapes passed on the way up, nearest to `name` first
        top, below = name, 0                # the tensor above the topmost factor, and the number of views below that
        while (node := graph.producer.get(source)) is not None:
            if (number := _number(graph, node)) is not None:
                source, factor = number[0], factor * number[1]
                top, below = source, len(views)
            elif node.op in ("Transpose", "Reshape"):
                views.append(node)
                source = node.inputs[0]
            else:
                break
        for node in reversed(views[:below]):
            top = self.add(f"{base}.{node.op.lower()}", node.op, [top], node.attrs)
        return top, factor

    # ---- masks
    def _mask(self, path: _ScorePath, base: str) -> list[str]:
        """Return [name of the mask to add to the scores], or []. Raise _NotFusible if masks cannot be combined."""
        _check_masks(path.masks)
        scores = self.graph.shape(path.nodes[-1].outputs[0])
        total = ""
        for mask in reversed(path.masks):          # from the product down to the softmax
            if mask.value is None:
                part = self._fitted(self._scaled(mask, base), mask.shape, scores, base)
                total = self._sum(total, part, base) if total else part
            else:
                total = self._hidden(mask, mask.hidden, total, scores, base)
        return [total] if total else []

    def _sum(self, total: str, part: str, base: str) -> str:
        """Return the name of the sum of two masks."""
        a, b = self.constant(total), self.constant(part)
        if a is not None and b is not None:
            return self.add_constant(f"{base}.mask", a + b)
        return self.add(f"{base}.mask", "Add", [total, part])

    def _hidden(self, mask: _Mask, number: float, total: str, scores: tuple[Dim, ...], base: str) -> str:
        """Return the mask `total` ("": none yet) with `number` wherever the condition hides a score."""
        condition, before = self.graph.constants.get(mask.name), self.constant(total)
        if not total or condition is not None and before is not None:
            part = self._fitted(self._where(mask, number, base), mask.shape, scores, base)
            if before is None:
                return part
            return self.add_constant(f"{base}.mask", combined(_in_place, self.constant(part), before, FLOAT))
        if mask.shape != scores:
            raise _NotFusible("its mask is made for scores of another shape")
        parts = [self.add_constant(f"{base}.hidden", np.full(1, number, np.float32)), total]
        return self.add(f"{base}.mask", "Where", [mask.name, *(parts if mask.holds else parts[::-1])])

    def _fitted(self, name: str, source_shape: tuple[Dim, ...], scores: tuple[Dim, ...], base: str) -> str:
        """Reshape a mask of scores of one shape for scores whose leading axes are merged or split otherwise."""
        if source_shape == scores:
            return name
        array, groups = self.constant(name), axis_groups(source_shape, scores)
        if array is None or groups is None or any(isinstance(extent, str) for extent in source_shape):
            raise _NotFusible("its mask is made for scores of another shape")
        array = array.reshape((*(1,) * (len(source_shape) - array.ndim), *array.shape))
        sizes, shape = list(array.shape), list(map(as_int, scores))
        for before, after in groups:
            alike = all(sizes[axis] == 1 for axis in before)
            for axis in before:
                sizes[axis] = 1 if alike else as_int(source_shape[axis])
            for axis in after:
                shape[axis] = 1 if alike else shape[axis]
        return self.add_constant(f"{base}.mask", np.broadcast_to(array, sizes).reshape(shape))

    def _scaled(self, mask: _Mask, base: str) -> str:
        array, factor = self.graph.constants.get(mask.name), mask.factor
        if factor == 1:
            return mask.name
        if array is not None:
            return self.add_constant(f"{base}.mask", array * array.dtype.type(factor))
        number = self.add_constant(f"{base}.factor", np.full(1, factor, self.type(mask.name).dtype))
        return self.add(f"{base}.mask", "Mul", [number, mask.name])

    def _where(self, mask: _Mask, value: float, base: str) -> str:
        """Return the name of a mask to add: 0 where a score is visible, the value where it is hidden."""
        array = self.graph.constants.get(mask.name)
        if array is not None:
            added = elementwise(partial(_added, mask.holds, value), array, FLOAT)
            return self.add_constant(f"{base}.mask", added)
        numbers = [self.add_constant(f"{base}.{label}", np.full(1, n, np.float32))
                   for label, n in (("hidden", value), ("seen", 0.0))]
        return self.add(f"{base}.mask", "Where", [mask.name, *(numbers if mask.holds else numbers[::-1])])


def _added(holds: bool, value: float, mask: Array) -> Array:
    """Return `value` where the mask equals `holds`, else 0, in float32."""
    return np.where(mask.astype(bool) == holds, value, 0).astype(np.float32)


def _in_place(hidden: Array, mask: Array) -> Array:
    """Return `hidden` where it is not 0, else `mask`."""
    return np.where(hidden != 0, hidden, mask)


def _check_masks(masks: Sequence[_Mask]) -> None:
    """Raise _NotFusible if the masks, the last applied first, cannot be combined into one to add to the scores."""
    values = [mask.value for mask in masks if mask.value is not None and mask.value > -math.inf]
    if len(set(values)) > 1:
        raise _NotFusible("its masks replace scores by different numbers")
    added = False
    for mask in masks:
        if added and mask.value is not None and mask.value > ABSORBING:
            raise _NotFusible("a mask is added to scores that another mask has replaced")
        added |= mask.value is None


def _scores(graph: Graph, node: Node, softmax: Node) -> _ScorePath:
    """Collect the nodes from the Softmax up to the product. Raise _NotFusible if one of them has other readers."""
    path = _ScorePath()
    name, below = softmax.inputs[0], softmax
    if reader(graph, softmax.outputs[0]) is not node:
        raise _NotFusible("other nodes read its softmax, too")
    while True:
        here = graph.producer.get(name)
        if here is None or reader(graph, name) is not below:
            raise _NotFusible("other nodes read its scores, or these are not a product")
        path.nodes.append(here)
        if here.op == "MatMul":
            return path
        name, below = _above(graph, here, path), here


def _above(graph: Graph, node: Node, path: _ScorePath) -> str:
    """Return the scores that the node reads, and record its factor or mask."""
    number = _number(graph, node)
    if number is not None:
        path.factor *= number[1]
        return number[0]
    shape = graph.shape(node.outputs[0])
    if node.op == "Add":
        for scores, mask in (node.inputs, node.inputs[::-1]):
            if graph.shape(scores) == shape and _leads_to_product(graph, scores):
                path.masks.append(_Mask(mask, shape, path.factor))
                return scores
    if node.op == "Where":
        condition, a, b = node.inputs
        for scores, fill, holds in ((b, a, True), (a, b, False)):
            value = scalar(graph, fill)
            if value is not None and value * path.factor <= MASKING and graph.shape(scores) == shape:
                path.masks.append(_Mask(condition, shape, value=value * path.factor, holds=holds))
                return scores
    if node.op == "Reshape" and graph.shape(node.inputs[0])[-2:] == shape[-2:]:
        return node.inputs[0]
    raise _NotFusible(f"{node.op} is between its scores and its softmax")


@dataflow
def _leads_to_product(graph: Graph, name: str) -> Walk[bool]:
    """Return True if the tensor is a product of two run-time tensors, perhaps scaled or masked."""
    node = graph.producer.get(name)
    if node is None:
        return False
    if node.op == "MatMul":
        return not any(graph.is_constant(factor) for factor in node.inputs)
    if node.op in ("Mul", "Add", "Where", "Reshape"):
        for above in node.inputs:
            if (node.op == "Reshape" or graph.shape(above) == graph.shape(name)) and (yield above):
                return True
    return False


def _number(graph: Graph, node: Node) -> tuple[str, float] | None:
    """Return (tensor, scalar) of a Mul by a finite constant scalar that keeps the tensor's shape, else None."""
    if node.op != "Mul":
        return None
    for x, factor in (node.inputs, node.inputs[::-1]):
        number = scalar(graph, factor)
        if number is not None and graph.shape(x) == graph.shape(node.outputs[0]) and math.isfinite(number):
            return x, number
    return None
