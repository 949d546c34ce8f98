"""Pointwise nodes, alone or in chains, casts and copies -> Pointwise."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.backends.llvm.bodies import COMPARISONS, LOGIC, WRITERS
from engines.backends.llvm.calls import Call, Context, Refused, Written, broadcast, lowers, write_body
from engines.backends.llvm.kernels.pointwise import Pointwise
from engines.backends.llvm.spec import View
from engines.ir import Node

FLOATS = ("uint8", "float32", "float16", "bfloat16")        # what a float tensor may be stored as
INTEGERS = ("bool", "int32", "int64")                       # what masks and token numbers are
EXACT = 1 << 24                                             # integers to here are float32 numbers


@lowers(*WRITERS)
def lower_pointwise(ctx: Context, node: Node) -> Sequence[Call]:
    written = write_body(ctx, node, None)
    views = tuple(broadcast(ctx, name, node.outputs[0]) for name in written.operands)
    readable = (*FLOATS, *(INTEGERS if _is_exact(ctx, node.anchor) else ()))
    return [pointwise_call(ctx, node, views, written, readable)]


def pointwise_call(ctx: Context, node: Node, views: tuple[View, ...], written: Written,
                   readable: Sequence[str] = FLOATS) -> Call:
    """The kernel that runs `written` over its operands, seen as `views`, of dtypes that may be read."""
    output = ctx.places[node.outputs[0]]
    if not views:
        raise Refused("it reads constants only")
    if any(view.dtype not in readable for view in views) or output.view.dtype not in (*FLOATS, "bool"):
        raise Refused("only arithmetic on floats, casts to floats and comparisons with small numbers are compiled")
    uniform = all(constant.size == 1 for constant in written.constants)
    spec = Pointwise(views, output.view, written.program, uniform)
    return Call(node, spec, tuple(ctx.places[name] for name in written.operands), (output,),
                {"program": written.constants})


def _is_exact(ctx: Context, node: Node) -> bool:
    """Whether the node answers integers read as float32 as it answers integers: rounding keeps their order, and no
    integer is rounded to or past one that a float32 can hold.
    """
    if node.op in ("Cast", "Where", *LOGIC):
        return True
    if node.op not in COMPARISONS:
        return False
    constants = [ctx.graph.constants[name] for name in node.inputs if name in ctx.graph.constants]
    if all(ctx.type(name).dtype == np.bool_ for name in node.inputs):
        return True
    return bool(constants) and all(np.abs(constant).max(initial=0) <= EXACT for constant in constants)
