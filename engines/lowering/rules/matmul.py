"""Rules for MatMul of two run-time tensors -> Product, and ScaledDotProductAttention -> Attention."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from infer_server.engines.ir.graph import BATCH, Dim, Node, TensorType
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.body import write_body
from infer_server.engines.lowering.calls.broadcast import broadcast_to
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.problems.matmul import MIDDLE, Attention, IntegerProduct, Product
from infer_server.engines.lowering.problems.view import View

DEEPEST = 1 << 14       # largest K: a panel of the right factor is packed on a thread's stack


def lower_product(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    (a, b), output = node.anchor.inputs, node.outputs[0]
    kinds, shape = [ctx.type(name) for name in (a, b)], ctx.type(output).shape
    if any(len(kind.shape) < 2 for kind in kinds):
        raise Refused("a factor of one axis is not compiled")
    *lead, rows, columns = shape
    depth = kinds[0].shape[-1]
    if isinstance(depth, str) or depth > DEEPEST:
        raise Refused(f"its inner extent {depth} is beyond {DEEPEST}")
    exact = node.precision == "int8" and all(kind.quant for kind in kinds)
    scale, *zeros = _numbers(kinds, 1.0)
    body = write_body(ctx, node, (scale, 0.0))
    left = _matrix_view(ctx, a, (*lead, rows, depth), shape)
    right = _matrix_view(ctx, b, (*lead, depth, columns), shape)
    y, *others = (_matrix_view(ctx, name, shape, shape) for name in (output, *body.operands))
    if left.strides[-1] != left.size or right.size not in right.strides[-2:]:
        raise Refused("the innermost axis of a factor is not contiguous")
    if columns == 1 and depth >= ctx.lanes and not any(kind.quant for kind in kinds):
        raise Refused("a matrix-vector product is compiled as a nest, vectorised along rows")
    problem = Product(left, right, y, tuple(others), body.program, "int8" if exact else node.precision)
    placements = [ctx.placements[name] for name in (a, b, *body.operands)]
    result = ctx.placements[output]
    result = result if BATCH in shape else replace(result, items=1)
    return [ProblemCall(node, problem, tuple(placements), (result,), {"numbers": zeros, "program": body.constants})]


def _matrix_view(ctx: Context, name: str, target: Sequence[Dim], result: Sequence[Dim]) -> View:
    """Return a tensor as matrices of one item, broadcast to `target`.

    Without a batch in `result` the whole tensor is one item. If the batch is the rows of the result, an item is a
    matrix of one row, and all items share the right factor.
    """
    view = broadcast_to(ctx, name, target)
    if result[0] == BATCH and len(result) > 2:
        return view
    strides = (view.item, *view.strides)
    if target[0] == BATCH:
        return replace(view, shape=(1, *view.shape), strides=(0, *view.strides))
    return View(view.dtype, tuple(as_int(extent) for extent in target), strides, 0)


@lowers("MatMulInteger")
def lower_integer_product(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    (a, b, *zeros), output = node.inputs, node.outputs[0]
    shape, zeros = ctx.type(output).shape, [*zeros, "", ""][:2]
    if any(len(ctx.type(name).shape) < 2 for name in (a, b)):
        raise Refused("a factor of one axis is not compiled")
    if ctx.type(a).dtype != np.uint8:
        raise Refused("its left factor is int8")
    if any(math.prod(ctx.type(name).shape) != 1 for name in zeros if name):
        raise Refused("it has several zero points")
    *lead, rows, columns = shape
    depth = ctx.type(a).shape[-1]
    if isinstance(depth, str) or depth > DEEPEST:
        raise Refused(f"its inner extent {depth} is beyond {DEEPEST}")
    left = _matrix_view(ctx, a, (*lead, rows, depth), shape)
    right = _matrix_view(ctx, b, (*lead, depth, columns), shape)
    if left.strides[-1] != 1 or 1 not in right.strides[-2:]:
        raise Refused("the innermost axis of a factor is not contiguous")
    numbers = [View(ctx.placements[name].view.dtype, (1,), (1,), 0) if name else None for name in zeros]
    problem = IntegerProduct(left, right, _matrix_view(ctx, output, shape, shape), zero_a=numbers[0], zero_b=numbers[1])
    result = ctx.placements[output]
    result = result if BATCH in shape else replace(result, items=1)
    return [ProblemCall(node, problem, tuple(ctx.placements[name] for name in (a, b, *zeros) if name), (result,))]


@lowers("ScaledDotProductAttention")
def lower_attention(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    attention, output = node.anchor, node.outputs[0]
    names, mask = attention.inputs[:3], (*attention.inputs, "")[3]
    shape = ctx.type(output).shape
    keys = ctx.type(names[1]).shape[-2]
    views = [broadcast_to(ctx, name, (*shape[:-2], *ctx.type(name).shape[-2:])) for name in names]
    y = ctx.placements[output]
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
    return [ProblemCall(node, problem, tuple(inputs), (y,), constants)]


def _numbers(types: Sequence[TensorType], scale: float) -> list[float]:
    """Return `scale` times the scales of the first two tensors, and the zero points of all."""
    quants = [kind.quant for kind in types]
    for quant in quants[:2]:
        scale *= quant.scale[0] if quant else 1.0
    return [scale, *(float(quant.zero_point[0]) if quant else 0.0 for quant in quants)]


def _mean_of(values: TensorType, exact: bool) -> tuple[float, float]:
    """Return (scale, offset) from the kernel's mean of stored values to real numbers."""
    if values.quant is None:
        return 1.0, 0.0
    scale, zero = values.quant.scale[0], values.quant.zero_point[0]
    return scale, scale * (MIDDLE - zero) if exact else 0.0
