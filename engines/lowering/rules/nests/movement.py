"""General rules for data movement: slices, tiles, triangles, reversed sequences."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.nest.program import FLOATING, KINDS
from infer_server.engines.ops.movement import Slice


@fallback_rule("Slice")
def lower_slice(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    name, w = node.inputs[0], NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    indices = list(w.axes)
    for axis, cut in Slice.cuts(node, len(indices)):
        if (cut.start, cut.stop, cut.step) != (None, None, 1):
            kept = range(w.extent(name, axis))[cut]
            indices[axis] = indices[axis] * kept.step + kept.start
    return [w.call(w.at(name, indices))]


@fallback_rule("Split")
def lower_split(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    name, axis, calls = node.inputs[0], node.attrs.get("axis", 0), []
    starts = [0, *accumulate(as_int(size) for size in node.attrs["split"])]
    for output, start in zip(node.outputs, starts, strict=False):
        w = NestWriter(ctx, replace(node, outputs=(output,)), ctx.type(output).shape)
        indices = list(w.axes)
        indices[axis] = indices[axis] + start
        calls.append(w.call(w.at(name, indices)))
    return calls


@fallback_rule("Transpose")
def lower_transpose(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    perm = node.attrs["perm"]
    return [w.call(w.at(node.inputs[0], [w.axes[perm.index(axis)] for axis in range(len(perm))]))]


@fallback_rule("Expand")
def lower_expand(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    return [w.call(w.broadcast(node.inputs[0]))]


@fallback_rule("Tile")
def lower_tile(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    name, w = node.inputs[0], NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    indices = [index if times == 1 else index % w.extent(name, axis)
               for axis, (index, times) in enumerate(zip(w.axes, node.attrs["repeats"], strict=True))]
    return [w.call(w.at(name, indices))]


@fallback_rule("ConstantOfShape")
def lower_fill(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    value = np.asarray(node.attrs.get("value", np.float32(0))).reshape(())
    kind = KINDS[value.dtype.name]
    return [w.call(w.constant(float(value) if kind in FLOATING else int(value), kind))]


@fallback_rule("Range")
def lower_range(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a Range between constants. Floats are computed in float64 and rounded once."""
    output = ctx.type(node.outputs[0])
    w, kind = NestWriter(ctx, node, output.shape), KINDS[output.dtype.name]
    start, _, delta = (ctx.constant(name).item() for name in node.inputs)
    count = w.axes[0].to("f64" if kind in FLOATING else "i64")
    return [w.call((count * delta + start).to(kind))]


# ---- matrices in the last two axes
@fallback_rule("Trilu")
def lower_triangle(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a Trilu: elements on the other side of the k-th diagonal become 0."""
    name, w = node.inputs[0], NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    k = as_int(node.attrs["k"])
    if w.batched and BATCH in ctx.type(name).shape[-2:]:
        raise Refused("the batch is an axis of its matrices")
    across = w.axes[-1] - w.axes[-2]
    kept = across >= k if node.attrs.get("upper", 1) else across <= k
    x = w.at(name, w.axes)
    return [w.call(w.where(kept, x, 0.0 if x.kind in FLOATING else 0))]


@fallback_rule("ReverseSequence")
def lower_reversed(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a ReverseSequence: the first `length` steps of each item are reversed."""
    name, lengths = node.inputs
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    items, time = node.attrs.get("batch_axis", 1), node.attrs.get("time_axis", 0)
    length, step = w.at(lengths, [w.axes[items]]).to("i64"), w.axes[time]
    indices = list(w.axes)
    indices[time] = w.where(step < length, length - 1 - step, step).within(w.extent(name, time))
    return [w.call(w.at(name, indices))]
