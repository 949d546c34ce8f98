"""Pointwise nodes, alone or in chains, casts and copies -> Pointwise."""
from __future__ import annotations

from collections.abc import Sequence

from engines.ir.graph import BATCH, Node
from engines.lowering.calls.body import write_body
from engines.lowering.calls.broadcast import broadcast
from engines.lowering.calls.calls import Call, Context, Refused, lowers
from engines.lowering.calls.placement import as_one_item, with_items
from engines.lowering.epilogue.from_onnx import WRITERS
from engines.lowering.problems.elementwise import CASTS, Pointwise
from engines.lowering.problems.view import FLOATS
from engines.lowering.rules import integers


@lowers(*dict.fromkeys((*WRITERS, *integers.OPERATIONS)))
def lower_pointwise(ctx: Context, node: Node) -> Sequence[Call]:
    if integers.is_on_integers(ctx, node):
        return integers.lower_integers(ctx, node)
    written = write_body(ctx, node, None)
    views = tuple(broadcast(ctx, name, node.outputs[0]) for name in written.operands)
    output = ctx.placements[node.outputs[0]]
    if not views:
        raise Refused("it reads constants only")
    if any(view.dtype not in (*FLOATS, *CASTS) for view in views) or output.view.dtype not in (*FLOATS, "bool"):
        raise Refused("only arithmetic on floats, and what makes floats of integers, is compiled")
    if len(ctx.type(node.outputs[0]).shape) == 1 and output.items != BATCH:     # what varies along the axis is constant
        items = int(output.items)
        views, output = tuple(with_items(view, items) for view in views), as_one_item(output)
    uniform = all(constant.size == 1 for constant in written.constants)
    spec = Pointwise(views, output.view, written.program, uniform)
    return [Call(node, spec, tuple(ctx.placements[name] for name in written.operands), (output,),
                 {"program": written.constants})]
