"""Masks of attention as exporters make them, in as few nodes and as small as they are.

    x.reshape(N * S, ...)[n * S + s]  for every item n  =  x[:, s]          a lookup that stays inside each item
    a & true = a | false = a
    f(expand(x), y) = f(x, y)                       if the result is as large without
    f(expand(x), number) = expand(f(x, number))     so that the step above meets it further down
    where(isnan(softmax(x)), 0, softmax(x)) = softmax(x)        ours gives zeros where there is nothing to see
"""
from __future__ import annotations

import numpy as np

from engines.ir import BATCH, Array, Graph, TensorType
from engines.passes.facts import is_pointwise, scalar
from engines.passes.rewrite import Constant, Draft, Match, P, Rule, Value
from engines.shapes import broadcast, dim, extent

_POINTWISE = P("Add Sub Mul Div Pow Max Min And Or Xor Not Where Equal Less LessOrEqual Greater GreaterOrEqual Cast "
               "Neg")


class LookupInItem(Rule):
    """Gather(Reshape(x [N, S, ...] -> [N * S, ...]), n * S + offsets)"""
    pattern = P("Gather", Value("flat"), Value("places"))

    def check(self, match: Match) -> bool:
        flat = match.graph.producer.get(match.value("flat"))
        if flat is None or flat.op != "Reshape" or match.root.attrs.get("axis", 0) != 0:
            return False
        source, target = match.shape(flat.inputs[0]), match.shape(flat.outputs[0])
        found = _by_item(match.graph, match.value("places"))
        if found is None or len(source) < 2 or source[0] != BATCH or not isinstance(source[1], int):
            return False
        step, offsets = found
        inside = offsets.min(initial=0) >= 0 and offsets.max(initial=0) < source[1]
        return step == source[1] and inside and target == (dim(extent(BATCH) * source[1]), *_unit(source[2:], target))

    def rewrite(self, match: Match, draft: Draft) -> None:
        graph = match.graph
        x, found = graph.producer[match.value("flat")].inputs[0], _by_item(graph, match.value("places"))
        assert found is not None
        offsets = found[1]
        if offsets.size != graph.shape(x)[1] or (offsets.ravel() != np.arange(offsets.size)).any():
            picked = (BATCH, offsets.size, *graph.shape(x)[2:])
            x = draft.node("Gather", [x, draft.constant("places", offsets.ravel())],
                           TensorType(graph.types[x].dtype, picked), {"axis": 1})
        draft.finish("Reshape", [x], {"shape": match.shape(match.root.outputs[0])})


def _unit(rest: tuple[int | str, ...], target: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The axes behind the flattened ones; a Flatten of [N, S] adds one of extent 1."""
    return rest or (1,) * (len(target) - 1)


def _by_item(graph: Graph, name: str) -> tuple[int, Array] | None:
    """(step, offsets) of integers that are n * step + offsets for item n, which is counted along the first axis."""
    if (constant := graph.constants.get(name)) is not None:
        return 0, constant
    node = graph.producer.get(name)
    if node is None:
        return None
    if node.op == "Range" and graph.shape(name) == (BATCH,):
        start, _, step = (graph.constants.get(i) for i in node.inputs)
        counts = start is not None and step is not None and start == 0 and step == 1
        return (1, np.zeros(1, np.int64)) if counts else None
    parts = [_by_item(graph, i) for i in node.inputs[:1 if node.op == "Reshape" else None]]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    if node.op == "Reshape" and found[0][0]:
        shape = graph.shape(name)
        return (found[0][0], found[0][1].reshape(1, *map(int, shape[1:]))) if shape[:1] == (BATCH,) else None
    if node.op == "Add":
        (a, x), (b, y) = found
        return a + b, np.asarray(x + y)
    if node.op == "Mul" and 0 in (found[0][0], found[1][0]):
        (a, x), (_, y) = sorted(found, key=lambda part: -part[0])
        return (a * int(y.reshape(())), np.asarray(x * y)) if y.size == 1 else None
    return None


class NeutralLogic(Rule):
    """And with nothing but true, Or with nothing but false"""
    pattern = P("And Or", Value("a"), Value("b"))

    def check(self, match: Match) -> bool:
        return self._other(match) is not None

    def rewrite(self, match: Match, draft: Draft) -> None:
        other, shape = self._other(match), match.shape(match.root.outputs[0])
        assert other is not None
        if match.shape(other) == shape:
            draft.same_as(other)
        else:
            draft.finish("Expand", [other], {"shape": shape})

    @staticmethod
    def _other(match: Match) -> str | None:
        neutral = match.root.op == "And"
        for name, other in (("a", "b"), ("b", "a")):
            constant = match.graph.constants.get(match.value(name))
            if constant is not None and (constant == neutral).all():
                return match.value(other)
        return None


class NeedlessExpand(Rule):
    """A pointwise node whose result is as large without the Expand of an operand"""
    pattern = _POINTWISE

    def check(self, match: Match) -> bool:
        shapes = [match.shape(name) for name in _sources(match)]
        return (is_pointwise(match.root) and _sources(match) != list(match.root.inputs)
                and broadcast(*shapes) == match.shape(match.root.outputs[0]))

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish(match.root.op, _sources(match), match.root.attrs)


class LaterExpand(Rule):
    """A pointwise node of one Expand and numbers"""
    pattern = _POINTWISE

    def check(self, match: Match) -> bool:
        others = [i for i in match.root.inputs if scalar(match.graph, i) is None]
        return is_pointwise(match.root) and len(others) == 1 and _sources(match) != list(match.root.inputs)

    def rewrite(self, match: Match, draft: Draft) -> None:
        shapes = [match.shape(name) for name in _sources(match)]
        made = match.graph.types[match.root.outputs[0]]
        inner = draft.node(match.root.op, _sources(match), TensorType(made.dtype, broadcast(*shapes)), match.root.attrs)
        draft.finish("Expand", [inner], {"shape": made.shape})


def _sources(match: Match) -> list[str]:
    """The node's inputs, with what was expanded in place of what it was expanded to."""
    nodes = [match.graph.producer.get(name) for name in match.root.inputs]
    return [node.inputs[0] if node is not None and node.op == "Expand" else name
            for node, name in zip(nodes, match.root.inputs, strict=True)]


class ExpandedLookup(Rule):
    """Gather(table, Expand(i)) = Expand(Gather(table, i)): token types, the same for every item"""
    pattern = P("Gather", Constant("table"), P("Expand", Constant("places")))

    def check(self, match: Match) -> bool:
        return not match.root.attrs.get("axis", 0)

    def rewrite(self, match: Match, draft: Draft) -> None:
        rows = np.take(match.constant("table"), match.constant("places"), axis=0)
        draft.finish("Expand", [draft.constant("rows", rows)], {"shape": match.shape(match.root.outputs[0])})


class SafeSoftmax(Rule):
    pattern = P("Where", P("IsNaN", Value("y")), Constant("zero"), Value("y"))

    def check(self, match: Match) -> bool:
        made = match.graph.producer.get(match.value("y"))
        return made is not None and made.op == "Softmax" and not match.constant("zero").any()

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.same_as(match.value("y"))


MASKS = (LookupInItem(), NeutralLogic(), NeedlessExpand(), LaterExpand(), ExpandedLookup(), SafeSoftmax())
