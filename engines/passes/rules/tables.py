"""What is computed of each row that is looked up is computed of the table: characters, before recurrent layers.

    table[i] @ W = (table @ W)[i]        table[i] + c = (table + c)[i]

through views that keep rows whole, which the places i are seen through instead. Of a padded sequence a recurrent layer
then costs what its used steps cost, for the product of all steps is gone.
"""
from __future__ import annotations

import numpy as np

from engines.ir.content import remembering
from engines.ir.graph import Array, Graph, Node
from engines.ir.grid import block_params, grid_params
from engines.passes.rewriting.facts import reader
from engines.passes.rewriting.rewrite import Constant, Draft, Match, P, Rule, Value
from engines.passes.rules.linear import is_canonical

KEPT = 4                # tables of products that are kept for the same model at other shapes
LARGEST = 1 << 20       # bytes of a table that is made though the weights take fewer: those of a second level of cache


class ProductOfRows(Rule):
    """A product of looked-up rows and weights is looked up in a table of products, if that takes no more bytes than the
    weights, which nobody needs then, or than LARGEST."""
    pattern = P("MatMul Gemm", Value("rows"), Constant("weights"))

    def check(self, match: Match) -> bool:
        weights, lookup, graph, root = match.constant("weights"), _lookup(match), match.graph, match.root
        if lookup is None or weights.ndim != 2 or root.op == "Gemm" and not (
                is_canonical(graph, root) and all(map(graph.is_constant, root.inputs[2:]))):
            return False
        table = graph.constants[lookup.inputs[0]]
        columns = weights.shape[0 if root.op == "Gemm" else 1]
        freed = 0 if reader(match.graph, match.value("weights")) is None else _stored_bytes(weights)
        return bool(len(table) * columns * table.itemsize <= max(freed, LARGEST))

    def rewrite(self, match: Match, draft: Draft) -> None:
        weights, lookup = match.constant("weights"), _lookup(match)
        assert lookup is not None
        table = match.graph.constants[lookup.inputs[0]]
        bias = [match.graph.constants[name] for name in match.root.inputs[2:]]
        made = _products(table, weights.T if match.root.op == "Gemm" else weights)
        _finish(match, draft, lookup, sum(bias, made))


class SumOfRows(Rule):
    """A bias of looked-up rows is added to the table, if nothing else reads that (there would be two of it), and if it
    is not stored as bytes, which a sum is not, or takes no more than LARGEST."""
    pattern = P("Add", Value("rows"), Constant("bias"))

    def check(self, match: Match) -> bool:
        bias, lookup = match.constant("bias"), _lookup(match)
        if (lookup is None or reader(match.graph, lookup.inputs[0]) is None
                or bias.shape != match.made.shape[-1:]):
            return False
        table = match.graph.constants[lookup.inputs[0]]
        return bool(table.nbytes <= max(_stored_bytes(table), LARGEST))

    def rewrite(self, match: Match, draft: Draft) -> None:
        lookup = _lookup(match)
        assert lookup is not None
        _finish(match, draft, lookup, match.graph.constants[lookup.inputs[0]] + match.constant("bias"))


@remembering(KEPT)
def _products(table: Array, weights: Array) -> Array:
    return (table.astype(np.float64) @ weights.astype(np.float64)).astype(table.dtype)


def _stored_bytes(weights: Array) -> int:
    """What the weights take in a plan: those that were quantised before are stored in a byte or half of one again."""
    if grid_params(weights, 0) is not None or grid_params(weights, 1) is not None:
        return weights.size
    return weights.nbytes if block_params(weights.T) is None and block_params(weights) is None else weights.size // 2


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
