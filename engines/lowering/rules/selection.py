"""Rules for operators with data-dependent result sizes: BoundedNonMaxSuppression -> Suppression."""
from __future__ import annotations

from collections.abc import Sequence

from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.calls.placement import as_one_item
from infer_server.engines.lowering.problems.selection import Suppression

MOST_BYTES = 1 << 21        # on a thread's stack: a score and an index per box, and the selected boxes


@lowers("BoundedNonMaxSuppression")
def lower_suppression(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    inputs = tuple(as_one_item(ctx.placements[name]) for name in node.inputs)
    outputs = tuple(as_one_item(ctx.placements[name]) for name in node.outputs)
    boxes, limit = inputs[0].view.shape[1], as_int(node.attrs["limit"])
    if not 0 < 8 * boxes + 20 * limit < MOST_BYTES:
        raise Refused(f"{boxes} boxes per class do not fit on a thread's stack")
    names = (*Suppression.reads, *Suppression.writes)
    views = {name: placement.view for name, placement in zip(names, (*inputs, *outputs), strict=True)}
    spec = Suppression(limit=limit, centred=bool(node.attrs.get("center_point_box", 0)), **views)
    return [ProblemCall(node, spec, inputs, outputs)]
