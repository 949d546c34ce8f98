"""Rules for pointwise chains, casts and copies -> Pointwise; those on integers and booleans -> Integers."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.body import write_body
from infer_server.engines.lowering.calls.broadcast import broadcast
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.calls.placement import Placement, as_one_item, with_items
from infer_server.engines.lowering.epilogue.from_onnx import WRITERS
from infer_server.engines.lowering.problems.elementwise import CASTS, Integers, Pointwise
from infer_server.engines.lowering.problems.view import FLOATS, View

# Operators without attributes; those of Clip, for example, are for floats only.
INTEGER_OPERATIONS: Mapping[str, str] = {
    "Identity": "copy", "Neg": "negate", "Abs": "absolute", "Add": "add", "Sub": "subtract", "Mul": "multiply",
    "Div": "divide", "Mod": "modulo",
    "Max": "greatest", "Min": "least", "Where": "where", "Equal": "equal", "Less": "less",
    "LessOrEqual": "less_or_equal", "Greater": "greater", "GreaterOrEqual": "greater_or_equal",
    "Not": "not", "And": "and", "Or": "or", "Xor": "xor",
    "BitwiseAnd": "and", "BitwiseOr": "or", "BitwiseXor": "xor", "BitwiseNot": "invert",
}


@lowers(*dict.fromkeys((*WRITERS, *INTEGER_OPERATIONS)))
def lower_pointwise(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    if _is_on_integers(ctx, node):
        return _lower_integers(ctx, node)
    written = write_body(ctx, node, None)
    views = tuple(broadcast(ctx, name, node.outputs[0]) for name in written.operands)
    output = ctx.placements[node.outputs[0]]
    if not views:
        raise Refused("it reads constants only")
    if any(view.dtype not in (*FLOATS, *CASTS) for view in views) or output.view.dtype not in (*FLOATS, "bool"):
        raise Refused("only float arithmetic and casts to float are compiled")
    views, output = _as_one(views, output)
    uniform = all(constant.size == 1 for constant in written.constants)
    spec = Pointwise(views, output.view, written.program, uniform)
    return [ProblemCall(node, spec, tuple(ctx.placements[name] for name in written.operands), (output,),
                        {"program": written.constants})]


def _as_one(views: tuple[View, ...], output: Placement) -> tuple[tuple[View, ...], Placement]:
    """View tensors without a batch as one item, so that runs of elements span the leading axis."""
    if output.items == BATCH:
        return views, output
    return tuple(with_items(view, as_int(output.items)) for view in views), as_one_item(output)


def _is_on_integers(ctx: Context, node: Node) -> bool:
    """Return True if all inputs and the output are integers or booleans; a Cast to integers may read floats."""
    made, *read = (ctx.type(name) for name in (node.outputs[0], *node.inputs) if name)
    if node.body or any(kind.quant for kind in (made, *read)) or made.dtype.kind not in "iub":
        return False
    return all(kind.dtype.kind in "iub" for kind in read) or node.op == "Cast" and made.dtype.kind != "b"


def _lower_integers(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a node for which `_is_on_integers` is true."""
    names, output = tuple(filter(None, node.inputs)), ctx.placements[node.outputs[0]]
    views = tuple(broadcast(ctx, name, node.outputs[0]) for name in names)
    operation = "copy" if node.op == "Cast" else INTEGER_OPERATIONS.get(node.op)
    if node.op == "Mod" and node.attrs.get("fmod"):
        operation = "remainder"
    if operation is None:
        raise Refused(f"no operation on integers for {node.op}")
    inputs = tuple(ctx.placements[name] for name in names)
    views, output = _as_one(views, output)
    return [ProblemCall(node, Integers(views, output.view, operation), inputs, (output,))]
