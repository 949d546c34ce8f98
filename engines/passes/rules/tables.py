"""Move products and sums from looked-up rows to the table, as for the characters of recurrent layers.

    table[i] @ W = (table @ W)[i]        table[i] + c = (table + c)[i]

Views that keep rows whole may stand between; they are applied to the indices i instead. A recurrent layer on a padded
sequence then costs only its valid steps, since there is no projection of all steps.
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.content import remembering
from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ir.grid import block_params, grid_params
from infer_server.engines.passes.rewriting.facts import reader
from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, P, Rule, Value
from infer_server.engines.passes.rules.linear import is_canonical

KEPT = 4                # number of cached tables, for the same model at other shapes
LARGEST = 1 << 20       # bytes of a table that is computed although the weights are smaller: it fits the L2 cache


class ProductOfRows(Rule):
    """Look up rows of a table of products in place of a product of looked-up rows and weights.

    The table must take no more bytes than the weights that it replaces, or than LARGEST.
    """
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
    """Add a bias of looked-up rows to the table, if nothing else reads the table.

    A table that could be stored in 8 or 4 bits, which the sum could not, must take no more bytes than LARGEST.
    """
    pattern = P("Add", Value("rows"), Constant("bias"))

    def check(self, match: Match) -> bool:
        bias, lookup = match.constant("bias"), _lookup(match)
        if (lookup is None or reader(match.graph, lookup.inputs[0]) is None
                or bias.shape != match.type.shape[-1:]):
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
    """Return the bytes that weights take in a plan: those on a grid are stored in one byte or half a byte each."""
    if grid_params(weights, 0) is not None or grid_params(weights, 1) is not None:
        return weights.size
    return weights.nbytes if block_params(weights.T) is None and block_params(weights) is None else weights.size // 2


def _lookup(match: Match) -> Node | None:
    """Return the Gather from a constant table of which the match's rows are a view, if nothing else reads them."""
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
    """Finish with a Gather of rows of `table`, its indices viewed as the match's rows were."""
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
