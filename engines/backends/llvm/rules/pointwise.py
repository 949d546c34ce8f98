"""Pointwise nodes, alone or in chains, casts and copies -> Pointwise."""
from __future__ import annotations

from collections.abc import Sequence

from engines.backends.llvm.bodies import WRITERS
from engines.backends.llvm.calls import Call, Context, Refused, Written, broadcast, lowers, write_body
from engines.backends.llvm.kernels.pointwise import INTEGERS, Pointwise
from engines.backends.llvm.lanes import FLOATS
from engines.backends.llvm.rules import integers
from engines.backends.llvm.spec import View
from engines.ir import Node


@lowers(*dict.fromkeys((*WRITERS, *integers.OPERATIONS)))
def lower_pointwise(ctx: Context, node: Node) -> Sequence[Call]:
    if integers.is_on_integers(ctx, node):
        return integers.lower_integers(ctx, node)
    written = write_body(ctx, node, None)
    views = tuple(broadcast(ctx, name, node.outputs[0]) for name in written.operands)
    return [pointwise_call(ctx, node, views, written)]


def pointwise_call(ctx: Context, node: Node, views: tuple[View, ...], written: Written) -> Call:
    """The kernel that runs `written` over its operands, seen as `views`."""
    output = ctx.places[node.outputs[0]]
    if not views:
        raise Refused("it reads constants only")
    if any(view.dtype not in (*FLOATS, *INTEGERS) for view in views) or output.view.dtype not in (*FLOATS, "bool"):
        raise Refused("only arithmetic on floats, and what makes floats of integers, is compiled")
    uniform = all(constant.size == 1 for constant in written.constants)
    spec = Pointwise(views, output.view, written.program, uniform)
    return Call(node, spec, tuple(ctx.places[name] for name in written.operands), (output,),
                {"program": written.constants})
