"""Simplify Gathers that exporters write in indirect forms: token types, positions, masks of single items.

    x.reshape(N * S, ...)[n * S + s]  for every item n  =  x[:, s]          a Gather inside each item
    x[n, s]  by GatherND of pairs (n, s)                =  x[:, s]
    x[n, i_n]  by GatherND of pairs (n, i_n)            =  GatherElements(x, i)     a row per item: its last token
    x.reshape(N * S, ...)[n * S + i_n]                  =  GatherElements(x, i)     one or more rows per item
    table[expand(i)] = expand(table[i])
    constant[i] = expand(number)                                    if all elements are one number
    GatherElements(x, expand(i)) = GatherElements(x, i, shape)      which broadcasts i
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from infer_server.engines.ir.graph import BATCH, Array, Dim, Graph
from infer_server.engines.ir.shapes import BatchInt, extent
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.passes.rewriting.dataflow import Walk, dataflow
from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, P, Rule, Value


class LookupInItem(Rule):
    """Rewrite Gather(Reshape(x [N, ...] -> [N * S, ...]), n * S + offsets)."""
    pattern = P("Gather", Value("flat"), Value("places"))

    def check(self, match: Match) -> bool:
        flat = match.graph.producer.get(match.value("flat"))
        if flat is None or flat.op != "Reshape" or match.root.attrs.get("axis", 0) != 0:
            return False
        found, size = by_item(match.graph, match.value("places")), _rows_of_item(match, match.value("flat"))
        if found is None or match.shape(flat.inputs[0])[0] != BATCH:
            return False
        step, offsets = found
        return step == size and offsets.min(initial=0) >= 0 and offsets.max(initial=0) < size

    def rewrite(self, match: Match, draft: Draft) -> None:
        graph, flat = match.graph, match.value("flat")
        x, found = graph.producer[flat].inputs[0], by_item(graph, match.value("places"))
        assert found is not None
        shape = (BATCH, _rows_of_item(match, match.value("flat")), *match.shape(flat)[1:])
        if match.shape(x) != shape:
            x = draft.node("Reshape", [x], {"shape": shape})
        _picked(match, draft, x, shape, found[1])


def _rows_of_item(match: Match, flat: str) -> int:
    """Return the number of rows of the flattened tensor per item; 0 if it is unknown."""
    rows = extent(match.shape(flat)[0])
    return rows.coefficient if isinstance(rows, BatchInt) and not rows.constant else 0


def _picked(match: Match, draft: Draft, x: str, shape: tuple[Dim, ...], offsets: Array) -> None:
    """Finish with x[:, offsets] in the shape of the root's output; x has shape `shape`."""
    if offsets.size != shape[1] or (offsets.ravel() != np.arange(offsets.size)).any():
        x = draft.node("Gather", [x, draft.constant("places", offsets.ravel())], {"axis": 1})
    draft.finish_view("Reshape", x)


class LookupOfPairs(Rule):
    """Rewrite GatherND(x [N, S, ...], pairs (n, offset))."""
    pattern = P("GatherND", Value("x"), P("Concat", Value("items"), Value("offsets"), bind="pairs"))

    def check(self, match: Match) -> bool:
        source, pairs = match.shape(match.value("x")), match["pairs"]
        found = self._offsets(match)
        if found is None or match.root.attrs.get("batch_dims", 0) or len(pairs.inputs) != 2 or len(source) < 2:
            return False
        along_last = pairs.attrs["axis"] % len(match.shape(pairs.outputs[0])) == len(match.shape(pairs.outputs[0])) - 1
        inside = isinstance(source[1], int) and found.min(initial=0) >= 0 and found.max(initial=0) < source[1]
        return along_last and inside and source[0] == BATCH

    def rewrite(self, match: Match, draft: Draft) -> None:
        offsets = self._offsets(match)
        assert offsets is not None
        _picked(match, draft, match.value("x"), match.shape(match.value("x")), offsets)

    @staticmethod
    def _offsets(match: Match) -> Array | None:
        items, offsets = (by_item(match.graph, match.value(name)) for name in ("items", "offsets"))
        if items is None or offsets is None or items[0] != 1 or items[1].any() or offsets[0]:
            return None
        return offsets[1]


@dataflow
def by_item(graph: Graph, name: str) -> Walk[tuple[int, Array] | None]:
    """Return (step, offsets) if the tensor holds the integers n * step + offsets for item n, else None.

    Items are counted along the first axis.
    """
    if (constant := graph.constants.get(name)) is not None:
        return 0, constant
    node = graph.producer.get(name)
    if node is None or graph.types[name].dtype.kind not in "iu":
        return None
    if node.op == "Range" and graph.shape(name) == (BATCH,):
        start, _, delta = (graph.constants.get(i) for i in node.inputs)
        counts = start is not None and delta is not None and start == 0 and delta == 1
        return (1, np.zeros(1, np.int64)) if counts else None
    if (combine := _COUNTING.get(node.op)) is None:
        return None
    parts: list[tuple[int, Array]] = []
    for source in node.inputs:
        if (part := (yield source)) is None:
            return None
        parts.append(part)
    return combine(graph.shape(name), *parts)


def _expanded(shape: tuple[Dim, ...], part: tuple[int, Array]) -> tuple[int, Array] | None:
    """Return (step, offsets) of an Expand to `shape`."""
    step, offsets = part
    alone = shape[:1] == (BATCH,) and (offsets.ndim == len(shape) and offsets.shape[0] == 1
                                       or offsets.ndim < len(shape) and not step)
    return (step, np.broadcast_to(offsets, (1, *map(int, shape[1:])))) if alone else None


def _reshaped(shape: tuple[Dim, ...], part: tuple[int, Array]) -> tuple[int, Array] | None:
    """Return (step, offsets) of a Reshape to `shape`."""
    step, offsets = part
    alone = shape[:1] == (BATCH,) and offsets.size == math.prod(map(as_int, shape[1:]))
    return (step, offsets.reshape(1, *map(int, shape[1:]))) if alone else None


def _added(_: tuple[Dim, ...], left: tuple[int, Array], right: tuple[int, Array]) -> tuple[int, Array]:
    """Return (step, offsets) of an Add."""
    return left[0] + right[0], np.asarray(left[1] + right[1])


def _multiplied(_: tuple[Dim, ...], left: tuple[int, Array], right: tuple[int, Array]) -> tuple[int, Array] | None:
    """Return (step, offsets) of a Mul by a scalar."""
    (step, x), (zero, y) = sorted((left, right), key=lambda part: -part[0])
    return (step * int(y.reshape(())), np.asarray(x * y)) if not zero and y.size == 1 else None


_COUNTING: Mapping[str, Callable[..., tuple[int, Array] | None]] = {
    "Add": _added, "Expand": _expanded, "Mul": _multiplied, "Reshape": _reshaped}


class LookupOfRow(Rule):
    """Rewrite GatherND(x [N, S, ...], pairs (n, index of item n))."""
    pattern = LookupOfPairs.pattern

    def check(self, match: Match) -> bool:
        source, pairs = match.shape(match.value("x")), match["pairs"]
        items = by_item(match.graph, match.value("items"))
        return (items is not None and items[0] == 1 and not items[1].any() and len(pairs.inputs) == 2
                and not match.root.attrs.get("batch_dims", 0) and len(source) > 2 and source[0] == BATCH
                and pairs.attrs["axis"] % 2 == 1 and match.shape(match.value("offsets")) == (BATCH, 1))

    def rewrite(self, match: Match, draft: Draft) -> None:
        x = match.value("x")
        _rows_of_each(match, draft, x, as_int(match.shape(x)[1]), match.value("offsets"))


class LookupOfFlatRow(Rule):
    """Rewrite Gather(Reshape(x [N, S, ...] -> [N * S, ...]), n * S + places [N, ...]).

    The places, as a TopK per item yields them, are assumed to lie inside their item.
    """
    pattern = P("Gather", Value("flat"), Value("places"))

    def check(self, match: Match) -> bool:
        flat = match.graph.producer.get(match.value("flat"))
        return (flat is not None and flat.op == "Reshape" and match.root.attrs.get("axis", 0) == 0
                and match.shape(flat.inputs[0])[0] == BATCH and self._added_index(match) is not None)

    def rewrite(self, match: Match, draft: Draft) -> None:
        position = self._added_index(match)
        assert position is not None
        x = match.graph.producer[match.value("flat")].inputs[0]
        _rows_of_each(match, draft, x, _rows_of_item(match, match.value("flat")), position)

    @staticmethod
    def _added_index(match: Match) -> str | None:
        """Return the tensor that is added to n * S, or None."""
        graph, positions = match.graph, match.graph.producer.get(match.value("places"))
        if positions is None or positions.op != "Add" or match.shape(positions.outputs[0])[:1] != (BATCH,):
            return None
        for start, position in (positions.inputs, positions.inputs[::-1]):
            numbers = by_item(graph, start)
            if (numbers is not None and numbers[0] and numbers[0] == _rows_of_item(match, match.value("flat"))
                    and not numbers[1].any() and match.shape(position) == match.shape(positions.outputs[0])):
                return position
        return None


def _rows_of_each(match: Match, draft: Draft, x: str, rows: int, positions: str) -> None:
    """Finish with x[n, places[n]], where x has `rows` rows per item and `positions` one or more indices per item."""
    size = math.prod(map(as_int, match.shape(x)[1:])) // rows
    count = math.prod(map(as_int, match.shape(positions)[1:]))
    data = draft.node("Reshape", [x], {"shape": (BATCH, rows, size)})
    index = draft.node("Reshape", [positions], {"shape": (BATCH, count, 1)})
    picked = draft.node("GatherElements", [data, index], {"axis": 1, "shape": (BATCH, count, size)})
    draft.finish_view("Reshape", picked)


class ExpandedLookup(Rule):
    """Move an Expand of constant indices after the Gather, as for token types that are equal for all items."""
    pattern = P("Gather", Constant("table"), P("Expand", Constant("places")))

    def check(self, match: Match) -> bool:
        return not match.root.attrs.get("axis", 0)

    def rewrite(self, match: Match, draft: Draft) -> None:
        rows = np.take(match.constant("table"), match.constant("places"), axis=0)
        draft.finish_view("Expand", draft.constant("rows", rows))


class LookupOfOneNumber(Rule):
    """Replace a GatherElements from a constant of equal elements, as token types by position, by an Expand."""
    pattern = P("GatherElements", Value("data"))

    def check(self, match: Match) -> bool:
        return self._number(match) is not None

    def rewrite(self, match: Match, draft: Draft) -> None:
        number = self._number(match)
        assert number is not None
        draft.finish_view("Expand", draft.constant("number", number))

    @staticmethod
    def _number(match: Match) -> Array | None:
        """Return the only value of the data as an array [1], or None."""
        name = match.value("data")
        source = match.graph.producer.get(name)
        data = match.graph.constants.get(source.inputs[0] if source is not None and source.op == "Expand" else name)
        return data.reshape(-1)[:1] if data is not None and data.size and (data == data.flat[0]).all() else None


class RepeatedPositions(Rule):
    """Let a GatherElements broadcast indices that are equal for all items, or heads."""
    pattern = P("GatherElements", Value("x"), Value("places"))

    def check(self, match: Match) -> bool:
        positions = match.graph.producer.get(match.value("places"))
        x, made = list(match.shape(match.value("x"))), list(match.type.shape)
        axis = match.root.attrs["axis"]
        return (positions is not None and positions.op == "Expand" and isinstance(made[axis], int)
                and x[:axis] + x[axis + 1:] == made[:axis] + made[axis + 1:])

    def rewrite(self, match: Match, draft: Draft) -> None:
        source = match.graph.producer[match.value("places")].inputs[0]
        attrs = {**match.root.attrs, "shape": match.type.shape}
        draft.finish("GatherElements", [match.value("x"), source], attrs)


LOOKUPS = (LookupInItem(), LookupOfPairs(), LookupOfRow(), LookupOfFlatRow(), ExpandedLookup(), LookupOfOneNumber(),
           RepeatedPositions())
