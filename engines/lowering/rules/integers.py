"""Pointwise nodes on integers and truth, and casts to them -> Integers."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from engines.ir.graph import Node
from engines.lowering.calls.broadcast import broadcast
from engines.lowering.calls.calls import Call, Context, Refused
from engines.lowering.problems.elementwise import STORED_INTEGERS, Integers

# What a node does; Clip's bounds and the like are attributes only of floats.
OPERATIONS: Mapping[str, str] = {
    "Identity": "copy", "Neg": "negate", "Abs": "absolute", "Add": "add", "Sub": "subtract", "Mul": "multiply",
    "Div": "divide", "Mod": "modulo",
    "Max": "greatest", "Min": "least", "Where": "where", "Equal": "equal", "Less": "less",
    "LessOrEqual": "less_or_equal", "Greater": "greater", "GreaterOrEqual": "greater_or_equal",
    "Not": "not", "And": "and", "Or": "or", "Xor": "xor",
    "BitwiseAnd": "and", "BitwiseOr": "or", "BitwiseXor": "xor", "BitwiseNot": "invert",
}
FLOAT = "float32"


def is_on_integers(ctx: Context, node: Node) -> bool:
    """Whether all that the node reads and makes is integers or truth; a Cast to integers may read floats."""
    made, *read = (ctx.type(name) for name in (node.outputs[0], *node.inputs) if name)
    if node.body or any(kind.quant for kind in (made, *read)) or made.dtype.kind not in "iub":
        return False
    return all(kind.dtype.kind in "iub" for kind in read) or node.op == "Cast" and made.dtype.kind != "b"


def lower_integers(ctx: Context, node: Node) -> Sequence[Call]:
    """The kernel of a node that `is_on_integers`."""
    names, output = tuple(filter(None, node.inputs)), ctx.placements[node.outputs[0]]
    views = tuple(broadcast(ctx, name, node.outputs[0]) for name in names)
    operation = "copy" if node.op == "Cast" else OPERATIONS.get(node.op)
    if node.op == "Mod" and node.attrs.get("fmod"):
        operation = "remainder"
    if operation is None:
        raise Refused(f"no operation on integers for {node.op}")
    readable = (*STORED_INTEGERS, FLOAT) if node.op == "Cast" else STORED_INTEGERS
    if any(view.dtype not in readable for view in views) or output.view.dtype not in STORED_INTEGERS:
        raise Refused(f"integers are compiled that are stored as {', '.join(STORED_INTEGERS)}")
    inputs = tuple(ctx.placements[name] for name in names)
    return [Call(node, Integers(views, output.view, operation), inputs, (output,))]
