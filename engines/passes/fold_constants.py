"""A node whose inputs are all constants is its value.

Results that are much larger than what they are made of stay computed (a ConstantOfShape of a million zeros costs less
to make than to store), but for what is little beside the model's other constants: a bias for each pair of positions.
"""
from __future__ import annotations

import math

from engines.ir.graph import Array, Graph, Node
from engines.ops import op_of
from engines.ops.reference import run_node

SPARE_ELEMENTS = 1 << 16        # results may be this much larger than the constants that they replace, each,
SPARE_SHARE = 4                 # and one part in this many of all constants, together


def fold_constants(graph: Graph) -> Graph:
    """The graph without nodes that compute the same values every time."""
    constants: dict[str, Array] = dict(graph.constants)
    spare = sum(array.size for array in constants.values()) // SPARE_SHARE
    kept: list[Node] = []
    for node in graph.nodes:
        growth = _growth(graph, node, constants)
        if growth is None or growth > max(SPARE_ELEMENTS, spare):
            kept.append(node)
        else:
            spare -= growth if growth > SPARE_ELEMENTS else 0
            values = run_node(node, [constants[name] if name else None for name in node.inputs])
            constants.update({name: value.astype(graph.types[name].dtype, copy=False)
                              for name, value in zip(node.outputs, values, strict=True)})
    return graph.rebuild(kept, constants=constants)


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
    return sum(math.prod(map(int, shape)) for shape in shapes) - given
