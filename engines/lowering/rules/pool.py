"""Rules for pools and reductions -> Pool, GlobalPool, Reduce, Extreme."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.lowering.calls.body import Body, BoundProgram, call_of, operand_views, program_of, written_for
from infer_server.engines.lowering.calls.broadcast import broadcast
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.calls.placement import Placement, as_one_item, reshaped_strides
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.images import GlobalPool, Pool
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.lowering.problems.rows import Extreme, Reduce
from infer_server.engines.lowering.problems.view import View
from infer_server.engines.ops.window import Window


@lowers("MaxPool", "AveragePool", images=True, volumes=True)
def lower_pool(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    pool = node.anchor
    if any(node.outputs[1:]):
        raise Refused("only its first output is compiled")
    written = write_pooled(Body.of(ctx, node), 1.0)
    x, y = ctx.placements[pool.inputs[0]].view, ctx.placements[node.outputs[0]].view
    quant, window = ctx.type(pool.inputs[0]).quant, Window.of(pool, len(x.shape) - 1)
    operands = tuple(broadcast(ctx, name, node.outputs[0]) for name in written.operands)
    pads = tuple(cells for side in zip(*window.pads, strict=True) for cells in side)
    spec = Pool(x, y, operands, written.program, "max" if pool.op == "MaxPool" else "average", window.kernel,
                window.strides, pads, window.dilations, bool(pool.attrs.get("count_include_pad")),
                quant.zero_point[0] if quant else 0)
    return [call_of(ctx, node, spec, written)]


@lowers("GlobalAveragePool", "GlobalMaxPool", images=True, volumes=True)
def lower_global_pool(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    pool = node.anchor
    x, y = ctx.placements[pool.inputs[0]].view, ctx.placements[node.outputs[0]].view
    kind = "max" if pool.op == "GlobalMaxPool" else "mean"
    written = written_for(partial(_averaged, Body.of(ctx, node)), math.prod(x.shape[:-1]) if kind == "mean" else 1)
    spec = GlobalPool(x, y, operand_views(ctx, node, written), written.program, "max" if kind == "max" else "sum")
    return [call_of(ctx, node, spec, written)]


@lowers("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")
def lower_reduction(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a reduction over supported axes.

    These are the innermost axis, adjacent axes between the items and the innermost one, or a whole item as one row; for
    extremes also all items.
    """
    if ctx.placements[node.anchor.inputs[0]].items == BATCH and node.anchor.op in ("ReduceMax", "ReduceMin") \
            and len(set(_axes(ctx, node))) == len(ctx.type(node.anchor.inputs[0]).shape):
        return [_over_batch(ctx, node)]
    x, y, axes = _reduced(ctx, node)
    reduction, rank = node.anchor, len(x.view.shape) + 1
    kind = {"ReduceMax": "max", "ReduceMin": "min"}.get(reduction.op, "sum")
    count = math.prod(x.view.shape[axis - 1] for axis in axes)
    written = written_for(partial(_averaged, Body.of(ctx, node)), *(
        count if reduction.op == op else 1 for op in ("ReduceMean", "ReduceSum")))
    if written.operands:
        raise Refused("its body reads another tensor")
    between = axes == tuple(range(axes[0], axes[-1] + 1)) and axes[-1] < rank - 1
    if axes == tuple(range(1, rank - 1)) and kind != "min":
        spec: Problem = GlobalPool(x.view, y.view, (), written.program, kind)
    elif between and kind != "min":
        spec, written = _reduced_between(ctx, node, x.view, y.view, axes, kind)
    elif axes == tuple(range(1, rank)) and rank > 2:
        row = _reshaped_view(x.view, (math.prod(x.view.shape),))
        one = View(y.view.dtype, (1,), (y.view.size,), y.view.item)
        spec = Reduce((row,), one, program=written.program, kind=kind)
    elif axes == (rank - 1,):
        view = y.view
        if not reduction.attrs.get("keepdims", 1):
            view = replace(view, shape=(*view.shape, 1), strides=(*view.strides, view.size))
        spec = Reduce((x.view,), view, program=written.program, kind=kind)
    else:
        raise Refused(f"{reduction.op} over axes {axes} of {rank}")
    return [ProblemCall(node, spec, (x,), (y,), {"program": written.constants})]


def _reduced(ctx: Context, node: Node) -> tuple[Placement, Placement, tuple[int, ...]]:
    """Return x, y and the axes with items leading. If the leading axis of x is reduced, all of x is one item."""
    name, output = node.anchor.inputs[0], node.outputs[0]
    x, y, axes = ctx.placements[name], ctx.placements[output], _axes(ctx, node)
    if not axes or axes[0] > 0:
        return x, y, axes
    if x.items == BATCH:
        raise Refused("it reduces the batch axis")
    return as_one_item(x), as_one_item(y) if ctx.type(output).shape else y, tuple(axis + 1 for axis in axes)


def _axes(ctx: Context, node: Node) -> tuple[int, ...]:
    rank = len(ctx.type(node.anchor.inputs[0]).shape)
    return tuple(sorted(int(a) % rank for a in node.anchor.attrs.get("axes", range(rank))))


def _over_batch(ctx: Context, node: Node) -> ProblemCall:
    """Return an Extreme, whose items share one result."""
    x, y = ctx.placements[node.anchor.inputs[0]], ctx.placements[node.outputs[0]]
    written = write_pooled(Body.of(ctx, node), 1.0)
    if written.operands:
        raise Refused("its body reads another tensor")
    strides = reshaped_strides(x.view, (math.prod(x.view.shape),))
    row = replace(x.view, shape=(math.prod(x.view.shape),), strides=strides) if strides else x.view
    one = View(y.view.dtype, (1,), (y.view.size,), 0)
    spec = Extreme((row,), one, program=written.program, kind=node.anchor.op[6:].lower())
    return ProblemCall(node, spec, (x,), (replace(y, view=one, items=BATCH),), {"program": written.constants})


def _reduced_between(ctx: Context, node: Node, x: View, y: View, axes: tuple[int, ...],
                     kind: str) -> tuple[Problem, BoundProgram]:
    """Lower a reduction of middle axes to a pool.

    Axes before the reduced ones, and those, are the rows of an image; axes after them are its columns and channels. The
    windows are as high as the reduced extent and do not overlap.
    """
    rows, count, columns = (math.prod(part) for part in (
        x.shape[:axes[0] - 1], x.shape[axes[0] - 1:axes[-1]], x.shape[axes[-1]:-1]))
    channels = x.shape[-1]
    terms = count if node.anchor.op == "ReduceSum" else 1       # the pool computes a mean
    written = written_for(partial(_summed, Body.of(ctx, node)), terms)
    image = _reshaped_view(x, (rows * count, columns, channels))
    result = _reshaped_view(y, (rows, columns, channels))
    spec = Pool(image, result, (), written.program, "max" if kind == "max" else "average", (count, 1), (count, 1))
    return spec, written


def _reshaped_view(view: View, shape: tuple[int, ...]) -> View:
    strides = reshaped_strides(view, shape)
    if strides is None:
        raise Refused("its axes are not contiguous")
    return replace(view, shape=shape, strides=strides)


def write_pooled(body: Body, scale: float, terms: int = 1) -> BoundProgram:
    """Write the program of a pool: accumulator * scale is the mean, maximum or sum of `terms` stored elements."""
    node = body.node
    quant = body.quants[node.anchor.inputs[0]]
    if not node.body and scale == terms == 1 and quant == body.quants[node.outputs[0]]:
        return BoundProgram(EpilogueProgram(), [], ())       # keep stored values: arithmetic would only round
    if quant is None:
        return program_of(body, (scale, 0.0))
    return program_of(body, (quant.scale[0] * scale, -quant.scale[0] * quant.zero_point[0] * terms))


def _averaged(body: Body, parts: int, terms: int = 1) -> BoundProgram:
    return write_pooled(body, 1 / parts, terms)


def _summed(body: Body, terms: int) -> BoundProgram:
    return write_pooled(body, terms, terms)
