"""Remove nodes that return their input unchanged.

    Identity(x) = Cast(x, its own dtype) = Reshape(x, its own shape) = Concat(x)
    = Pad(x, 0) = Resize(x, 1) = ReduceSum(x, over no axes) = x + 0 = x * 1 = x times the identity matrix = x
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ops import op_of
from infer_server.engines.passes.rewriting.facts import pads, spatial
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, P, Rule

# Each list has one condition under which a node returns its first input; see `_computes_nothing` and `_neutral`.
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0, "Pow": 1.0}
_JOINS = ("Concat", "Max", "Min")
_SAME_IF_SHAPE_IS = ("Reshape", "Expand", "Tile", "Pad", "Slice", "Split", "Flatten", "Squeeze", "Unsqueeze")
_POOLS = ("MaxPool", "AveragePool")
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")


class RemoveNoOp(Rule):
    pattern = P(" ".join(("Identity Cast Transpose Resize MatMul", *_SAME_IF_SHAPE_IS, *_JOINS, *_POOLS, *_REDUCTIONS,
                          *_NEUTRAL)))

    def check(self, match: Match) -> bool:
        return _unchanged(match.graph, match.root) is not None

    def rewrite(self, match: Match, draft: Draft) -> None:
        value = _unchanged(match.graph, match.root)
        assert value is not None
        draft.same_as(value)


def _unchanged(graph: Graph, node: Node) -> str | None:
    """Return the input that the node's first output is equal to, or None."""
    if any(graph.consumers.get(o) or o in graph.outputs for o in node.outputs[1:] if o):
        return None         # a MaxPool's indices, the other parts of a Split
    x, y = node.inputs[0], node.outputs[0]
    if node.op in _NEUTRAL:
        return _neutral(graph, node)
    if node.op == "MatMul":
        return x if _is_identity(graph.constants.get(node.inputs[1])) else None
    if not _computes_nothing(graph, node) or graph.types[x].shape != graph.types[y].shape:
        return None
    if node.op == "Identity" and y in graph.outputs and (x not in graph.producer or x in graph.outputs):
        return None         # a graph output equal to an input, a constant or another output needs a node
    return x


def _computes_nothing(graph: Graph, node: Node) -> bool:
    """Return True if a node, whose output has the shape of its first input, leaves the elements unchanged."""
    if node.op in _JOINS:
        return len(node.inputs) == 1
    if node.op == "Cast":
        return graph.types[node.inputs[0]].dtype == graph.types[node.outputs[0]].dtype
    if node.op == "Transpose":
        return all(extent == 1 or axis == place for place, (axis, extent) in
                   enumerate(zip(node.attrs["perm"], graph.types[node.outputs[0]].shape, strict=True)))
    if node.op == "Slice":
        return all(step > 0 for step in node.attrs["steps"])
    if node.op == "Pad":
        return not any(node.attrs["pads"])          # a shift keeps the shape: it crops and pads
    if node.op in _REDUCTIONS:
        return not node.attrs.get("axes", (0,))
    if node.op == "Resize":
        return True                                         # it copies, as in ONNX Runtime; see engines/ops/resize.py
    if node.op in _POOLS:
        rank = len(graph.types[node.inputs[0]].shape) - 2
        return set(node.attrs["kernel_shape"]) == {1} == set(spatial(node, rank, "strides", 1)) \
            and not any(pads(node, rank))
    return True


def _is_identity(matrix: Array | None) -> bool:
    return (matrix is not None and matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
            and bool(np.all(matrix.diagonal() == 1)) and np.count_nonzero(matrix) == len(matrix))


def _neutral(graph: Graph, node: Node) -> str | None:
    """Return x for x + 0, 0 + x, x - 0, x * 1, 1 * x, x / 1 and x ** 1, else None."""
    sides = (0, 1) if op_of(node.op).commutative else (0,)
    for side in sides:
        constant = graph.constants.get(node.inputs[1 - side])
        if constant is None or not _is_all(constant, _NEUTRAL[node.op]):
            continue
        if graph.types[node.inputs[side]] == graph.types[node.outputs[0]]:
            return node.inputs[side]
    return None


def _is_all(constant: Array, value: float) -> bool:
    """Return True if each element is the value; tests the first one before a scan of the whole array."""
    return not constant.size or bool(constant.flat[0] == value and np.all(constant == value))
