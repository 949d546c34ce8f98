"""A node whose inputs are all constants is its value.

Results that are much larger than what they are made of stay computed (a ConstantOfShape of a million zeros costs less
to make than to store), but for what is little beside the model's other constants: a bias for each pair of positions;
and for weights that the model computes (a filter of sines): a layer multiplies by each of them, which costs more than
to read them, and its kernels want them packed. A small file may describe a hundred layers of such weights: what does
not fit stays computed, too.
"""
from __future__ import annotations

import math

from engines.ir.counted import as_int
from engines.ir.graph import Array, Graph, Node
from engines.ops import op_of
from engines.ops.counting import deferred, is_deferred
from engines.ops.reference import run_node
from engines.passes.rewriting.facts import is_weighted

SPARE_ELEMENTS = 1 << 16        # results may be this much larger than the constants that they replace, each,
SPARE_SHARE = 4                 # and one part in this many of all constants, together
WEIGHT_ELEMENTS = 1 << 22       # weights may be this much larger, each,
MOST_ELEMENTS = 1 << 24         # until all constants are so many; where they are, by SPARE_SHARE together


def fold_constants(graph: Graph) -> Graph:
    """The graph without nodes that compute the same values every time."""
    constants: dict[str, Array] = dict(graph.constants)
    size = sum(array.size for array in constants.values())
    spare = {False: size // SPARE_SHARE, True: max(MOST_ELEMENTS - size, size // SPARE_SHARE)}     # True: for weights
    kept: list[Node] = []
    weights = _made_for_weights(graph)
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
    return graph.rebuild(kept, constants=constants)


def _made_for_weights(graph: Graph) -> set[str]:
    """The tensors that constants alone make weights of."""
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
    """How many elements more the node makes than it reads; None if it is not known before run time what it makes."""
    if any(name and name not in constants for name in node.inputs) or op_of(node.op).random(node):
        return None
    if any(graph.types[name].quant for name in (*filter(None, node.inputs), *node.outputs)):
        return None
    shapes = [graph.shape(name) for name in node.outputs]
    if any(isinstance(d, str) for shape in shapes for d in shape):
        return None
    given = sum(constants[name].size for name in node.inputs if name)
    return sum(math.prod(map(as_int, shape)) for shape in shapes) - given
