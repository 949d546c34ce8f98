"""Rules for Conv, Gemm and MatMul: with constant weights -> Contraction or Depthwise; else -> Product."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import BATCH, Node, QParams
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.body import BoundProgram, call_of, write_body
from infer_server.engines.lowering.calls.broadcast import broadcast, image, is_image
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.calls.placement import Placement, with_items
from infer_server.engines.lowering.problems.convolution import Contraction, Depthwise
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import Halo, View
from infer_server.engines.lowering.rules.matmul import lower_product
from infer_server.engines.ops.window import Window
from infer_server.engines.passes.rewriting.facts import is_product


@lowers("Conv", images=True, volumes=True)
def lower_conv(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    conv = node.anchor
    weights = ctx.constant(conv.inputs[1])
    x, stride, dilation = padded_input(ctx, conv, weights.shape[2:])
    groups, taps = int(conv.attrs.get("group", 1)), tuple(map(int, weights.shape[2:]))
    depthwise = groups > 1 and weights.shape[:2] == (groups, 1) and len(taps) == 2
    if not depthwise:
        weights, groups = merge_small_groups(weights, groups, ctx.lanes)
    body = write_body(ctx, node, accumulator_of(ctx, node, sum_of_couts(weights)))
    y, pads = ctx.placements[node.outputs[0]], Window.of(conv, len(taps)).pads
    border = border_of(ctx, conv, x.view, [before for before, _ in pads])
    views = [x.view, y.view, *(broadcast(ctx, name, node.outputs[0]) for name in body.operands)]
    if len(taps) == 2 and views[0].shape[1] == views[1].shape[1] == 1 < taps[0]:    # a 1-D signal: transpose it
        views = [transposed(view) for view in views]
        taps, stride, dilation = taps[::-1], stride[::-1], dilation[::-1]
        border, weights = Halo(border.left, border.top, border.right, border.bottom), weights.swapaxes(2, 3)
    of_x, of_y, *operands = views
    if depthwise:
        problem: Problem = Depthwise(of_x, of_y, tuple(operands), body.program, node.precision, taps, stride, dilation)
    else:
        problem = Contraction(of_x, of_y, tuple(operands), body.program, node.precision, taps, stride, dilation, groups,
                              border, node.precision == "int8" and bounded(weights))
    call = call_of(ctx, node, problem, body, weights=weights)
    return [replace(call, inputs=(x, *call.inputs[1:]))]


def transposed(view: View) -> View:
    """Transpose the rows and columns of an image."""
    (height, width, *shape), (row, column, *strides) = view.shape, view.strides
    return replace(view, shape=(width, height, *shape), strides=(column, row, *strides))


@lowers("Gemm", "MatMul")
def lower_matmul(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    product = node.anchor
    if is_product(ctx.graph, node) or len(ctx.type(product.inputs[1]).shape) > 2:      # batched, for example per head
        return lower_product(ctx, node)
    weights = ctx.constant(product.inputs[1])
    if weights.ndim != 2 or product.attrs.get("transA"):
        raise Refused("only constant weights [N, K] are compiled")
    if product.op == "MatMul" or not product.attrs.get("transB"):
        weights = weights.T
    body = write_body(ctx, node, accumulator_of(ctx, node, weights.sum(axis=1, dtype=np.float64)))
    x, y, operands = matrices(ctx, node, body)
    kept = ctx.type(product.inputs[1]).quant
    problem = Contraction(x.view, y.view, operands, body.program, node.precision,
                          weights=kept.dtype if kept and node.precision != "int8" else "")
    call = call_of(ctx, node, problem, body, weights=weights[:, :, None, None])
    return [replace(call, inputs=(x, *call.inputs[1:]), outputs=(y,))]


def matrices(ctx: Context, node: Node, body: BoundProgram) -> tuple[Placement, Placement, tuple[View, ...]]:
    """Return x, y and the program's operands as images.

    Without a batch all leading axes become pixels of one image if they are contiguous: the kernel tiles these together,
    but would tile items of one row each on their own.
    """
    x, y = ctx.placements[node.anchor.inputs[0]], ctx.placements[node.outputs[0]]
    views = [x.view, y.view, *(broadcast(ctx, name, node.outputs[0]) for name in body.operands)]
    if y.items != BATCH:
        items = [as_int(x.items), *[as_int(y.items)] * (len(views) - 1)]
        together = [with_items(view, count) for view, count in zip(views, items, strict=True)]
        if all(map(is_image, together)):
            x, y, views = replace(x, items=1), replace(y, items=1), together
    of_x, of_y, *operands = map(image, views)
    return replace(x, view=of_x), replace(y, view=of_y), tuple(operands)


def bounded(weights: Array) -> bool:
    """Return True if sums of any bytes times the weights [cout, ...] are within +-2**25."""
    rows = weights.reshape(len(weights), -1)
    highest, lowest = (limit(rows, 0).sum(axis=1, dtype=np.int64) for limit in (np.maximum, np.minimum))
    return bool(255 * max(highest.max(), -lowest.min()) < 1 << 25)


def sum_of_couts(weights: Array) -> Array:
    """Sum weights [cout, cin, *taps] to [cout]."""
    return np.asarray(weights.sum(axis=tuple(range(1, weights.ndim)), dtype=np.float64))


def padded_input(ctx: Context, conv: Node, taps: Sequence[int]) -> tuple[Placement, tuple[int, ...], tuple[int, ...]]:
    """Return the input as seen from the first tap of the first output pixel, halo included; stride; dilation."""
    window = Window.of(conv, len(taps))
    reach = ((as_int(extent) - 1) * s + span for extent, s, span in zip(
        ctx.type(conv.outputs[0]).shape[1:-1], window.strides, window.spans, strict=True))
    placement = ctx.placements[conv.inputs[0]].moved(*(-before for before, _ in window.pads), 0)
    view = replace(placement.view, shape=(*reach, placement.view.shape[-1]))
    return replace(placement, view=view), window.strides, window.dilations


def border_of(ctx: Context, conv: Node, view: View, before: Sequence[int]) -> Halo:
    """Return the rows and columns of zeros at the edges of what the taps reach, given the padding before the image.

    It is empty for a nonzero zero point.
    """
    quant = ctx.type(conv.inputs[0]).quant
    if quant is not None and quant.zero_point[0] != 0 or len(view.shape) != 3:
        return Halo()
    (top, left), (height, width) = before, (as_int(extent) for extent in ctx.type(conv.inputs[0]).shape[1:3])
    return Halo(max(top, 0), max(left, 0), max(view.shape[0] - top - height, 0), max(view.shape[1] - left - width, 0))


def accumulator_of(ctx: Context, node: Node, weight_sums: Array) -> tuple[Any, ...]:
    """Return (scale, offset) from the integer sum to the real result, or (scale, bias, shift).

        real = sx * sw[o] * (sum of xq * wq - zx * sum of wq) + bias[o]

    The zero point's part belongs to the offset unless float32 would round it by more than the result's step, as for
    ranges that include outliers. It is then a shift, subtracted from the sum first.
    """
    anchor = node.anchor
    bias = ctx.constant(anchor.inputs[2]).reshape(-1) if len(anchor.inputs) > 2 and anchor.inputs[2] else np.float64(0)
    x, w = ctx.type(anchor.inputs[0]).quant, ctx.type(anchor.inputs[1]).quant
    if x is None:
        return _scales(w, len(weight_sums)) if w else 1.0, bias.astype(np.float64)
    if w is None:
        raise Refused("its input is quantised, but not its weights")
    scale = x.scale[0] * _scales(w, len(weight_sums))
    shift, bias = x.zero_point[0] * weight_sums, bias.astype(np.float64)
    if np.max(np.abs(scale * shift)) * np.finfo(np.float32).eps > _finest_step(ctx, node):
        return scale, bias, shift
    return scale, bias - scale * shift


def _scales(weights: QParams, couts: int) -> Array:
    """Return one scale, or one per cout. A transposed convolution repeats those of a group."""
    scales = np.asarray(weights.scale, np.float64)
    return scales if len(scales) == 1 else np.tile(scales, couts // len(scales))


def _finest_step(ctx: Context, node: Node) -> float:
    """Return the smallest quantisation step of the node's result and of rounding within its body."""
    quant = ctx.type(node.outputs[0]).quant
    rounded = [part.attrs["scale"] for part in node.body if part.op == "FakeQuantize"]
    return min([*rounded, *(quant.scale if quant else ())], default=math.inf)


def merge_small_groups(weights: Array, groups: int, lanes: int) -> tuple[Array, int]:
    """Merge groups with fewer couts than a vector has lanes; the merged weights are block diagonal.

    [groups * cout, cin, p, q] becomes [merged * (k * cout), k * cin, p, q], with k groups in one. Multiplications by
    zeros use lanes that would be idle.
    """
    cout, cin = weights.shape[0] // groups, weights.shape[1]
    k = next((k for k in range(1, groups + 1) if groups % k == 0 and k * cout >= lanes), groups)
    if groups == 1 or k == 1:
        return weights, groups
    merged = np.zeros((groups // k, k, cout, k, cin, *weights.shape[2:]), weights.dtype)
    blocks = weights.reshape(groups // k, k, cout, cin, *weights.shape[2:])
    for i in range(k):
        merged[:, i, :, i] = blocks[:, i]
    return merged.reshape(groups * cout, k * cin, *weights.shape[2:]), groups // k

