"""What is computed of each row that is looked up is computed of the table: characters, before recurrent layers.

    table[i] @ W = (table @ W)[i]        table[i] + c = (table + c)[i]

through views that keep rows whole, which the places i are seen through instead. Of a padded sequence a recurrent layer
then costs what its used steps cost, for the product of all steps is gone.
"""
from __future__ import annotations

import numpy as np

from engines.ir.graph import Array, Graph, Node
from engines.passes.rewriting.facts import reader
from engines.passes.rewriting.rewrite import Constant, Draft, Match, P, Rule, Value

LARGEST = 1 << 20       # bytes of a table that is made though the weights take fewer: those of a second level of cache


class ProductOfRows(Rule):
    """A table of products is no larger than the weights, which all would be read, or than LARGEST."""
    pattern = P("MatMul Gemm", Value("rows"), Constant("weights"))

    def check(self, match: Match) -> bool:
        weights, attrs, lookup = match.constant("weights"), match.root.attrs, _lookup(match)
        if lookup is None or weights.ndim != 2 or len(match.root.inputs) > 2 or attrs.get("transA") or {1} != {
                attrs.get(name, 1) for name in ("alpha", "beta")}:
            return False
        table = match.graph.constants[lookup.inputs[0]]
        columns = weights.shape[0 if attrs.get("transB") else 1]
        return bool(len(table) * columns * table.itemsize <= max(weights.nbytes, LARGEST))

    def rewrite(self, match: Match, draft: Draft) -> None:
        weights, lookup = match.constant("weights"), _lookup(match)
        assert lookup is not None
        table = match.graph.constants[lookup.inputs[0]]
        matrix = (weights.T if match.root.attrs.get("transB") else weights).astype(np.float64)
        _finish(match, draft, lookup, (table.astype(np.float64) @ matrix).astype(table.dtype))


class SumOfRows(Rule):
    """Of a table that nothing else reads: there would be two of it."""
    pattern = P("Add", Value("rows"), Constant("bias"))

    def check(self, match: Match) -> bool:
        bias, lookup = match.constant("bias"), _lookup(match)
        return (lookup is not None and reader(match.graph, lookup.inputs[0]) is not None
                and bias.shape == match.made.shape[-1:])

    def rewrite(self, match: Match, draft: Draft) -> None:
        lookup = _lookup(match)
        assert lookup is not None
        _finish(match, draft, lookup, match.graph.constants[lookup.inputs[0]] + match.constant("bias"))


def _lookup(match: Match) -> Node | None:
    """The Gather of rows of a constant table that the match's rows are a view of, if nothing else reads them."""
    graph, name = match.graph, match.value("rows")
    while (node := graph.producer.get(name)) is not None and reader(graph, name) is not None:
        if node.op == "Gather":
            table = graph.constants.get(node.inputs[0])
            plain = table is not None and table.ndim == 2 and table.dtype == np.float32
            return node if plain and not node.attrs.get("axis", 0) else None
        if not _keeps_rows(graph, node):
            return None
        name = node.inputs[0]
    return None


def _keeps_rows(graph: Graph, node: Node) -> bool:
    shape, rank = graph.shape(node.inputs[0]), len(graph.shape(node.outputs[0]))
    if node.op == "Transpose":
        return bool(node.attrs["perm"][-1] == rank - 1)
    return node.op == "Reshape" and rank > 0 and shape[-1:] == graph.shape(node.outputs[0])[-1:]


def _finish(match: Match, draft: Draft, lookup: Node, table: Array) -> None:
    """Finishes with the rows of that table, at the places that the match's rows stand at."""
    views, name = [], match.value("rows")
    while name != lookup.outputs[0]:
        views.append(match.graph.producer[name])
        name = views[-1].inputs[0]
    places = lookup.inputs[1]
    for view in reversed(views):
        attrs = ({"perm": view.attrs["perm"][:-1]} if view.op == "Transpose"
                 else {"shape": match.shape(view.outputs[0])[:-1]})
        places = draft.node(view.op, [places], attrs)
    draft.absorb(lookup, *views)
    draft.finish("Gather", [draft.constant("table", table), places], {"axis": 0})


TABLES = (ProductOfRows(), SumOfRows())
