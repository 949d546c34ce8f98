"""Constant folding: replace each node whose inputs are all constants by its value.

A result much larger than its inputs stays computed at run time (a ConstantOfShape of a million zeros costs less to
compute than to store), with two exceptions: results that are small relative to the model's other constants, such as a
bias for each pair of positions; and computed weights, such as a filter of sines, since kernels pack weights at the
build. Both have a budget, because a small file may describe a hundred layers of such weights.
"""
from __future__ import annotations

import math
from collections import Counter

from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops import op_of
from infer_server.engines.ops.reference import run_node
from infer_server.engines.ops.symbolic import deferred, is_deferred
from infer_server.engines.passes.rewriting.facts import is_weighted

SPARE_ELEMENTS = 1 << 16        # elements that any one result may have more than the constants it replaces
SPARE_SHARE = 4                 # larger results may add 1 / SPARE_SHARE of the model's constants in total
WEIGHT_ELEMENTS = 1 << 22       # elements that one computed weight may add
MOST_ELEMENTS = 1 << 24         # computed weights fill the constants up to this size, or add 1 / SPARE_SHARE


def fold_constants(graph: Graph) -> Graph:
    """Return the graph with each deterministic node of constant inputs folded, as far as the budgets allow."""
    constants: dict[str, Array] = dict(graph.constants)
    size = sum(array.size for array in constants.values())
    spare = {False: size // SPARE_SHARE, True: max(MOST_ELEMENTS - size, size // SPARE_SHARE)}     # key: is a weight
    kept: list[Node] = []
    weights = _weight_sources(graph)
    readers = Counter([*graph.outputs, *(name for node in graph.nodes for name in node.inputs)])
    for node in graph.nodes:
        growth, weight = _growth(graph, node, constants), bool(weights.intersection(node.outputs))
        allowed = min(WEIGHT_ELEMENTS, spare[weight]) if weight else spare[weight]
        if growth is None or growth > max(SPARE_ELEMENTS, allowed):
            kept.append(node)
        else:
            spare[weight] -= growth if growth > SPARE_ELEMENTS else 0
            given = [constants[name] if name else None for name in node.inputs]
            types = tuple(graph.types[name] for name in node.outputs)
            if is_deferred(node, given, types):
                constants.update(zip(node.outputs, deferred(node, given, types), strict=True))
                continue
            values = run_node(node, given)
            constants.update({name: value.astype(graph.types[name].dtype, copy=False)
                              for name, value in zip(node.outputs, values, strict=True)})
            del given, values
            readers.subtract(node.inputs)
            for name in {*node.inputs} - {""}:
                if not readers[name]:
                    del constants[name]
    return graph.rebuild(kept, constants=constants)


def _weight_sources(graph: Graph) -> set[str]:
    """Return the tensors, computed from constants alone, that weights are computed from, weights included."""
    known = {*graph.constants, ""}
    for node in graph.nodes:
        if known.issuperset(node.inputs):
            known.update(node.outputs)
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if known.issuperset(node.inputs):
            found.update(node.inputs if found.intersection(node.outputs) else ())
        elif is_weighted(node):
            found.update(known.intersection(node.inputs[1:2]))
    return found - {*graph.constants, ""}


def _growth(graph: Graph, node: Node, constants: dict[str, Array]) -> int | None:
    """Return the number of elements of a node's outputs less that of its inputs; None if it cannot be folded."""
    if any(name and name not in constants for name in node.inputs) or op_of(node.op).random(node):
        return None
    if any(graph.types[name].quant for name in (*filter(None, node.inputs), *node.outputs)):
        return None
    shapes = [graph.shape(name) for name in node.outputs]
    if any(isinstance(d, str) for shape in shapes for d in shape):
        return None
    given = sum(constants[name].size for name in node.inputs if name)
    return sum(math.prod(map(as_int, shape)) for shape in shapes) - given
