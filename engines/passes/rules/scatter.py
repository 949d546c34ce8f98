"""Replace ScatterND to consecutive rows or columns by a Concat of kept and new parts.

    ScatterND(x, rows i, i + 1, ... j - 1, new) = Concat(x[:i], new, x[j:])         along the first axis
    ScatterND(x, (n, i), (n, i + 1), ... (n, j - 1) for all n, new)                 = Concat along the second axis
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.graph import Array
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, No, P, Rule, Value
from infer_server.engines.passes.rules.lookups import by_item


class ScatterOfRows(Rule):
    pattern = P("ScatterND", Value("x"), Constant("rows"), Value("new"))

    def check(self, match: Match) -> bool | No:
        rows, extent = match.constant("rows"), match.shape(match.value("x"))[0]
        if rows.ndim != 2 or rows.shape[1] != 1:
            return No("its indices are not rows")
        return _follow(match, rows[:, 0], extent)

    def rewrite(self, match: Match, draft: Draft) -> None:
        _join(match, draft, match.constant("rows")[:, 0], 0)


class ScatterOfColumns(Rule):
    """Replace PyTorch's export of x[:, i:j] = new: a ScatterND to pairs (item, column)."""
    pattern = P("ScatterND", Value("x"), Value("places"), Value("new"))

    def check(self, match: Match) -> bool | No:
        shape, columns = match.shape(match.value("x")), self._columns(match)
        if columns is None or len(shape) < 2:
            return No("its columns are not constant and equal for all items")
        return _follow(match, columns, shape[1])

    def rewrite(self, match: Match, draft: Draft) -> None:
        columns = self._columns(match)
        assert columns is not None
        _join(match, draft, columns, 1)

    @staticmethod
    def _columns(match: Match) -> Array | None:
        """Return the columns that are assigned to, if they are equal for all items, else None."""
        graph, indices, items = match.graph, match.value("places"), match.shape(match.value("x"))[0]
        if match.shape(indices)[-1] != 2:
            return None
        if graph.is_constant(indices):
            if not isinstance(items, int) or match.shape(indices)[0] != items:
                return None
            pairs = match.constant("places").reshape(items, -1, 2)
            alike = np.array_equal(pairs[:, :, 0] % items, np.broadcast_to(np.arange(items)[:, None], pairs.shape[:2]))
            return pairs[0, :, 1] if alike and np.all(pairs[:, :, 1] == pairs[0, :, 1]) else None
        made = graph.producer.get(indices)
        if made is None or made.op != "Concat" or len(made.inputs) != 2:
            return None
        numbers, columns = (by_item(graph, name) for name in made.inputs)
        if numbers is None or columns is None or numbers[0] != 1 or numbers[1].any() or columns[0]:
            return None
        return columns[1].ravel()


def _follow(match: Match, indices: Array, extent: int | str) -> bool | No:
    """Return True if a ScatterND overwrites consecutive indices of an axis of this extent."""
    if match.root.attrs.get("reduction", "none") != "none":
        return No("it has a reduction")
    if not isinstance(extent, int) or not indices.size:
        return No("the extent of its axis is unknown, or it has no indices")
    first = int(indices[0]) % extent
    return np.array_equal(indices % extent, np.arange(first, first + len(indices))) or No(
        "its indices are not consecutive")


def _join(match: Match, draft: Draft, indices: Array, axis: int) -> None:
    """Finish with a Concat of the parts before, at and after the indices `indices` of an axis."""
    x, new = match.value("x"), match.value("new")
    shape = match.shape(x)
    extent, first = as_int(shape[axis]), int(indices[0]) % as_int(shape[axis])
    wanted = (*shape[:axis], len(indices), *shape[axis + 1:])
    if match.shape(new) != wanted:
        new = draft.node("Reshape", [new], {"shape": wanted})
    before, behind = ([draft.cut(x, axis, start, end)] if start < end else []
                      for start, end in ((0, first), (first + len(indices), extent)))
    draft.finish("Concat", [*before, new, *behind], {"axis": axis})
