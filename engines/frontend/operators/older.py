"""Rules for forms of nodes that only opsets before 9 have.

Before opset 7 an attribute sets how two operands broadcast: aligned at their last axes, or the second one's first axis
at `axis` of the first. Mere renamings (sizes as attributes, a type as a string) are in the operator's main rule.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.normalise import OLDER, OperatorCall, Rule, normalise
from infer_server.engines.frontend.operators.parts import NodeBuilder
from infer_server.engines.ir.graph import Node


def older(*ops: str, before: int) -> Callable[[Rule], Rule]:
    """Register the rule of operators in opsets before `before`."""
    def register(function: Rule) -> Rule:
        OLDER.update(dict.fromkeys(ops, (before, function)))
        return function
    return register


@older("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less", before=7)
def _aligned(call: OperatorCall) -> list[Node]:
    axis, shape = call.attr("axis"), call.type(1).shape
    call.ignore("broadcast")        # follows from the shapes
    if axis is None:
        return call.node_with(2)
    w = NodeBuilder(call)
    behind = call.rank - len(shape) - axis % max(call.rank, 1)
    if behind < 0:
        raise GraphError(f"the second operand's {len(shape)} axes do not fit the first's {call.rank} from axis {axis} "
                         "on")
    return w.finish(call.node.op, call.node.inputs[0],
                    w("Reshape", call.node.inputs[1], shape=(*shape, *(1,) * behind)))


@older("Gemm", before=7)
def _product(call: OperatorCall) -> list[Node]:
    call.ignore("broadcast")        # follows from the shapes
    return normalise(replace(call, opset=7))


@older("PRelu", before=7)
def _of_channels(call: OperatorCall) -> list[Node]:
    """Normalise PRelu, with one slope or one per channel."""
    shape = call.type(1).shape
    if shape in ((), (1,)) or len(shape) > 1 or call.rank < 3:
        return call.node_with(2)
    w = NodeBuilder(call)
    return w.finish("PRelu", call.node.inputs[0],
                    w("Reshape", call.node.inputs[1], shape=(*shape, *(1,) * (call.rank - 2))))


@older("BatchNormalization", before=9)
def _batch_normalization(call: OperatorCall) -> list[Node]:
    """Normalise BatchNormalization; with spatial=0, statistics per pixel, it becomes pointwise arithmetic."""
    if len(call.node.outputs) > 1 and call.opset < 7:
        raise GraphError("it is in training mode; export the model for inference")
    call.ignore("is_test", "momentum")
    if call.attr("spatial", 1):
        return normalise(replace(call, opset=9))
    w, (x, scale, bias, mean, variance) = NodeBuilder(call), call.node.inputs
    epsilon = w.constant(np.array(call.attr("epsilon", 1e-5), call.type().dtype))
    deviation = w("Sqrt", w("Add", variance, epsilon))
    return w.finish("Add", w("Mul", w("Sub", x, mean), w("Div", scale, deviation)), bias)


@older("Tile", before=6)
def _tiled(call: OperatorCall) -> list[Node]:
    """Normalise Tile, which repeats along one axis before opset 6."""
    (tiles,), (axis,) = call.ints(1) or (1,), call.ints(2) or (0,)
    repeats = [1] * call.rank
    repeats[axis] = tiles
    return call.node_with(1, repeats=tuple(repeats))


@older("Reshape", before=5)
def _reshaped(call: OperatorCall) -> list[Node]:
    shape = np.array(call.attr("shape", ()), np.int64)
    name = f"{call.node.outputs[0]}.shape"
    return normalise(replace(call, opset=5, node=replace(call.node, inputs=(call.node.inputs[0], name)),
                             types=(call.types[0], None), values=(call.values[0], shape)))


@older("Concat", before=4)
def _joined(call: OperatorCall) -> list[Node]:
    axis = call.attr("axis", 1)
    return normalise(replace(call, opset=4, node=replace(call.node, attrs={"axis": axis})))


@older("Pad", before=2)
def _padded(call: OperatorCall) -> list[Node]:
    pads = call.attr("paddings")
    return normalise(replace(call, opset=2, node=replace(call.node, attrs={**call.node.attrs, "pads": pads})))
