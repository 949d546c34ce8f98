"""ScaledDotProductAttention -> Attention."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.backends.llvm.calls import Call, Context, Refused, broadcast_to, lowers, write_body
from engines.backends.llvm.factors import MIDDLE
from engines.backends.llvm.kernels.attention import Attention
from engines.backends.llvm.rules.pointwise import FLOATS
from engines.backends.llvm.spec import Array, View, dense_view
from engines.ir import Node, TensorType


@lowers("ScaledDotProductAttention")
def lower_attention(ctx: Context, node: Node) -> Sequence[Call]:
    attention, output = node.anchor, node.outputs[0]
    names, mask = attention.inputs[:3], (*attention.inputs, "")[3]
    if any(name in ctx.graph.constants for name in names):
        raise Refused("one of its factors is a constant")
    factors, y = [ctx.places[name] for name in names], ctx.places[output]
    views = [place.view for place in factors]
    if any(view.dtype not in FLOATS for view in (*views, y.view)):
        raise Refused("only floats, or floats stored as uint8, are compiled")
    types = [ctx.type(name) for name in names]
    exact = node.precision == "int8" and all(kind.quant for kind in types)
    written = write_body(ctx, node, _mean_of(types[2], exact))
    if written.operands:
        raise Refused("its body reads another tensor")
    q, k, v = views
    scores = (*ctx.type(output).shape[:3], k.shape[1])
    fixed = mask in ctx.graph.constants
    constants: dict[str, Any] = {"numbers": _numbers(types, attention.attrs["scale"]), "program": written.constants}
    inputs, mask_view = list(factors), None
    if fixed:
        constants["mask"], mask_view = _fixed_mask(ctx.constant(mask), [int(extent) for extent in scores[1:]])
    elif mask:
        inputs.append(ctx.places[mask])
        mask_view = broadcast_to(ctx, mask, scores)
        if mask_view.dtype != "float32":
            raise Refused("its mask is not stored as float32")
    spec = Attention(q, k, v, y.view, mask_view, fixed, written.program, "int8" if exact else node.precision)
    return [Call(node, spec, tuple(inputs), (y,), constants)]


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


def _fixed_mask(mask: Array, shape: Sequence[int]) -> tuple[Array, View]:
    """A constant mask, and how the kernel sees it beside scores of one item, [heads, S, T]."""
    if mask.ndim == 4 and mask.shape[0] != 1:
        raise Refused("its constant mask differs from item to item")
    mask = mask.reshape((*(1,) * (3 - mask.ndim), *mask.shape)[-3:])
    dense = dense_view("float32", mask.shape)
    strides = tuple(0 if extent == 1 else stride for extent, stride in zip(mask.shape, dense.strides, strict=True))
    return np.asarray(mask, np.float32), View("float32", tuple(shape), strides, 0)
