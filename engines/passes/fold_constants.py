"""A node whose inputs are all constants is its value.

Results that are much larger than what they are made of stay computed (a ConstantOfShape of a million zeros costs less
to make than to store).
"""
from __future__ import annotations

import math

from engines.ir import Array, Graph, Node
from engines.ops import op_of
from engines.reference import run_node

SPARE_ELEMENTS = 1 << 16        # results may be this much larger than the constants that they replace


def fold_constants(graph: Graph) -> Graph:
    """The graph without nodes that compute the same values every time."""
    constants: dict[str, Array] = dict(graph.constants)
    kept: list[Node] = []
    for node in graph.nodes:
        values = _folded(graph, node, constants)
        if values is None:
            kept.append(node)
        else:
            constants.update(zip(node.outputs, values, strict=True))
    return graph.rebuild(kept, constants=constants)


def _folded(graph: Graph, node: Node, constants: dict[str, Array]) -> tuple[Array, ...] | None:
    if any(name and name not in constants for name in node.inputs):
        return None
    if any(graph.types[name].quant for name in (*filter(None, node.inputs), *node.outputs)):
        return None
    shapes = [graph.shape(name) for name in node.outputs]
    if any(isinstance(d, str) for shape in shapes for d in shape):
        return None
    given = sum(constants[name].size for name in node.inputs if name)
    if sum(math.prod(map(int, shape)) for shape in shapes) > given + SPARE_ELEMENTS:
        return None
    if op_of(node.op).random(node):
        return None
    return run_node(node, [constants[name] if name else None for name in node.inputs])
