"""Replace repetition by Expand, and compute values that are equal for all items once.

    Tile(x, repeats) = Reshape(Expand(Reshape(x)))          with a new axis for each repeated axis
    ConstantOfShape(shape) = Expand(number, shape)
    f(Expand(x)) = Expand(f(x))                             along the batch: of constants, f(x) is then a constant
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import BATCH, Dim, Graph, Node
from infer_server.engines.ops import OPS, op_of
from infer_server.engines.ops.items import Mixed
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, P, Rule, Value

Shape = tuple[Dim, ...]


class TileToExpand(Rule):
    """Replace a Tile: [.., n, ..] -> [.., 1, n, ..] -> [.., r, n, ..] -> [.., r * n, ..]; axes of 1 expand directly."""
    pattern = P("Tile", Value("x"))

    def check(self, match: Match) -> bool:
        pairs = zip(match.shape(match.value("x")), match.root.attrs["repeats"], strict=True)
        return all(repeat == 1 or extent != BATCH for extent, repeat in pairs)

    def rewrite(self, match: Match, draft: Draft) -> None:
        x = match.value("x")
        apart: list[Dim] = []
        repeated: list[Dim] = []
        for extent, repeat in zip(match.shape(x), match.root.attrs["repeats"], strict=True):
            own = extent != 1 and repeat != 1
            apart += [1, extent] if own else [extent]
            repeated += [repeat, extent] if own else [repeat if extent == 1 else extent]
        if len(apart) == len(match.type.shape):
            draft.finish_view("Expand", x)
            return
        for op, made in (("Reshape", tuple(apart)), ("Expand", tuple(repeated))):
            x = draft.node(op, [x], {"shape": made})
        draft.finish_view("Reshape", x)


class FillToExpand(Rule):
    """Replace a ConstantOfShape whose shape depends on the batch; others are folded."""
    pattern = P("ConstantOfShape")

    def check(self, match: Match) -> bool:
        return BATCH in match.type.shape

    def rewrite(self, match: Match, draft: Draft) -> None:
        number = np.asarray(match.root.attrs.get("value", 0), match.type.dtype).reshape(1)
        draft.finish_view("Expand", draft.constant("number", number))


class ItemsAlike(Rule):
    """Compute a node for one item if all its batched operands are Expands along the batch, and expand the result."""
    pattern = P(" ".join(set(OPS) - {"Expand"}))

    def check(self, match: Match) -> bool:
        node, graph = match.root, match.graph
        made = match.shape(node.outputs[0])
        alike = [_of_one(graph, name) for name in node.inputs if name]
        if len(node.outputs) != 1 or made.count(BATCH) != 1 or None in alike or not any(alike):
            return False
        return _keeps_items_apart(graph, node) and _shape_of_one(graph, node) == _without_batch(made)

    def rewrite(self, match: Match, draft: Draft) -> None:
        graph, node = match.graph, match.root
        one = draft.node(node.op, [self._one(graph, name, draft) for name in node.inputs], _attrs_of_one(node))
        draft.finish_view("Expand", one)

    @staticmethod
    def _one(graph: Graph, name: str, draft: Draft) -> str:
        """Return the operand for one item: without its Expand along the batch."""
        if not name or BATCH not in graph.shape(name):
            return name
        source, shape = graph.producer[name].inputs[0], _without_batch(graph.shape(name))
        if graph.shape(source) == shape:
            return source
        return draft.node("Expand", [source], {"shape": shape})


def _without_batch(shape: Sequence[Dim]) -> Shape:
    return tuple(1 if extent == BATCH else extent for extent in shape)


def _of_one(graph: Graph, name: str) -> bool | None:
    """Return True for an Expand along the batch, False for an operand without the batch axis, None for others."""
    node, shape = graph.producer.get(name), graph.shape(name)
    if BATCH not in shape:
        return False
    if node is None or node.op != "Expand" or shape.count(BATCH) != 1:
        return None
    return True if BATCH not in graph.shape(node.inputs[0]) else None


def _keeps_items_apart(graph: Graph, node: Node) -> bool:
    """Return True if item n of the result depends on item n of the operands alone, equally for all n."""
    inputs, outputs = ([graph.types[name] if name else None for name in names] for names in (node.inputs, node.outputs))
    items = [kind.shape.index(BATCH) if kind is not None and BATCH in kind.shape else None for kind in inputs]
    try:
        op_of(node.op).item_axes(node, inputs, tuple(filter(None, outputs)), items)
    except Mixed:
        return False
    return True


def _attrs_of_one(node: Node) -> dict[str, Any]:
    """Return the attributes with 1 in place of the batch."""
    return {key: _without_batch(value) if key in ("shape", "sizes") else value for key, value in node.attrs.items()}


def _shape_of_one(graph: Graph, node: Node) -> Shape:
    """Return the shape of the node's output for one item."""
    kinds = [replace(graph.types[name], shape=_without_batch(graph.shape(name))) if name else None
             for name in node.inputs]
    one = replace(node, attrs=_attrs_of_one(node))
    return op_of(node.op).infer(one, kinds, [graph.constants.get(name) for name in node.inputs])[0].shape


EXPANDS = (TileToExpand(), FillToExpand(), ItemsAlike())
