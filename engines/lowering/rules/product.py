"""MatMul of two tensors that are computed at run time -> Product."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.ir.graph import BATCH, Dim, Node
from engines.lowering.calls.body import write_body
from engines.lowering.calls.broadcast import broadcast_to
from engines.lowering.calls.calls import Call, Context, Refused
from engines.lowering.calls.placement import batch_axis
from engines.lowering.problems.matmul import Product
from engines.lowering.problems.view import FLOATS, View

DEEPEST = 1 << 14       # of K: a panel of the right factor is packed on a thread's stack


def lower_product(ctx: Context, node: Node) -> Sequence[Call]:
    (a, b), output = node.anchor.inputs, node.outputs[0]
    kinds, shape = [ctx.type(name) for name in (a, b)], ctx.type(output).shape
    if any(len(kind.shape) < 2 for kind in kinds):
        raise Refused("a factor of one axis is not compiled")
    if any(batch_axis(ctx.type(name)) for name in (a, b, output)):
        raise Refused("the batch is not the leading axis of all of its tensors")
    *lead, rows, columns = shape
    depth = kinds[0].shape[-1]
    if isinstance(depth, str) or depth > DEEPEST:
        raise Refused(f"its inner extent {depth} is beyond {DEEPEST}")
    exact = node.precision == "int8" and all(kind.quant for kind in kinds)
    scale = 1.0
    for kind in kinds:
        scale *= kind.quant.scale[0] if kind.quant else 1.0
    body = write_body(ctx, node, (scale, 0.0))
    left, right = _seen(ctx, a, (*lead, rows, depth), shape), _seen(ctx, b, (*lead, depth, columns), shape)
    y, others = _seen(ctx, output, shape, shape), tuple(_seen(ctx, name, shape, shape) for name in body.operands)
    if any(view.dtype not in FLOATS for view in (left, right, y, *others)):
        raise Refused("only floats, or floats stored as uint8, are compiled")
    if left.strides[-1] != left.size or right.size not in right.strides[-2:]:
        raise Refused("no axis of a factor that is multiplied lies in one piece")
    problem = Product(left, right, y, others, body.program, "int8" if exact else node.precision)
    zeros = [float(kind.quant.zero_point[0]) if kind.quant else 0.0 for kind in kinds]
    placements = [ctx.placements[name] for name in (a, b, *body.operands)]
    result = ctx.placements[output]
    result = result if BATCH in shape else replace(result, items=1)
    return [Call(node, problem, tuple(placements), (result,), {"numbers": zeros, "program": body.constants})]


def _seen(ctx: Context, name: str, target: Sequence[Dim], result: Sequence[Dim]) -> View:
    """A tensor as matrices of one item, broadcast to `target`; without a batch in `result` all of it is one item.

    Where the batch is the rows of the result, an item is a matrix of one row, and the right factor is every item's.
    """
    view = broadcast_to(ctx, name, target)
    if result[0] == BATCH and len(result) > 2:
        return view
    strides = (view.item, *view.strides)
    if target[0] == BATCH:
        return replace(view, shape=(1, *view.shape), strides=(0, *view.strides))
    return View(view.dtype, tuple(int(extent) for extent in target), strides, 0)
