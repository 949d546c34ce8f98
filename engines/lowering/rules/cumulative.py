"""CumSum -> CumulativeSum."""
from __future__ import annotations

from collections.abc import Sequence

from engines.ir.graph import Node
from engines.lowering.calls.calls import Call, Context, Refused, lowers
from engines.lowering.problems.elementwise import CumulativeSum

SUMMED = ("float32", "int32", "int64")


@lowers("CumSum")
def lower_cumulative_sum(ctx: Context, node: Node) -> Sequence[Call]:
    x, y = ctx.placements[node.inputs[0]], ctx.placements[node.outputs[0]]
    axis = node.attrs["axis"] - 1
    if axis < 0:
        raise Refused("it sums over the items of a batch")
    if x.view.dtype not in SUMMED or x.view.dtype != y.view.dtype:
        raise Refused(f"sums are compiled of {', '.join(SUMMED)}")
    spec = CumulativeSum(x.view, y.view, axis, bool(node.attrs.get("exclusive", 0)), bool(node.attrs.get("reverse", 0)))
    return [Call(node, spec, (x,), (y,))]
