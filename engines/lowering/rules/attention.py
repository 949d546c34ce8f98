"""ScaledDotProductAttention -> Attention."""
from __future__ import annotations

from collections.abc import Sequence

from engines.ir.graph import Node, TensorType
from engines.lowering.calls.body import write_body
from engines.lowering.calls.broadcast import broadcast_to
from engines.lowering.calls.calls import Call, Context, Refused, lowers
from engines.lowering.calls.placement import batch_axis
from engines.lowering.problems.matmul import MIDDLE, Attention
from engines.lowering.problems.view import FLOATS


@lowers("ScaledDotProductAttention")
def lower_attention(ctx: Context, node: Node) -> Sequence[Call]:
    attention, output = node.anchor, node.outputs[0]
    names, mask = attention.inputs[:3], (*attention.inputs, "")[3]
    shape = ctx.type(output).shape
    keys = ctx.type(names[1]).shape[-2]
    if any(batch_axis(ctx.type(name)) for name in (*names, *filter(None, [mask]), output)):
        raise Refused("the batch is not the leading axis of all of its tensors")
    views = [broadcast_to(ctx, name, (*shape[:-2], *ctx.type(name).shape[-2:])) for name in names]
    y = ctx.placements[output]
    if any(view.dtype not in FLOATS for view in (*views, y.view)):
        raise Refused("only floats, or floats stored as uint8, are compiled")
    types = [ctx.type(name) for name in names]
    exact = node.precision == "int8" and all(kind.quant for kind in types)
    body = write_body(ctx, node, _mean_of(types[2], exact))
    if body.operands:
        raise Refused("its body reads another tensor")
    inputs, mask_view = [ctx.placements[name] for name in names], None
    if mask:
        inputs.append(ctx.placements[mask])
        mask_view = broadcast_to(ctx, mask, (*shape[:-1], keys))
        if mask_view.dtype != "float32":
            raise Refused("its mask is not stored as float32")
    constants = {"numbers": _numbers(types, attention.attrs["scale"]), "program": body.constants}
    q, k, v = views
    problem = Attention(q, k, v, y.view, mask_view, body.program, "int8" if exact else node.precision)
    return [Call(node, problem, tuple(inputs), (y,), constants)]


def _numbers(types: Sequence[TensorType], scale: float) -> list[float]:
    """The kernel's "numbers": what makes scores of sums of stored elements, and the zero points."""
    quants = [kind.quant for kind in types]
    for quant in quants[:2]:
        scale *= quant.scale[0] if quant else 1.0
    return [scale, *(float(quant.zero_point[0]) if quant else 0.0 for quant in quants)]


def _mean_of(values: TensorType, exact: bool) -> tuple[float, float]:
    """(scale, offset) that make real numbers of the kernel's mean of stored values."""
    if values.quant is None:
        return 1.0, 0.0
    scale, zero = values.quant.scale[0], values.quant.zero_point[0]
    return scale, scale * (MIDDLE - zero) if exact else 0.0
