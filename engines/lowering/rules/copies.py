"""Rules for data movement: Slice, Split, Reshape, Transpose (unless views), Expand, Pad -> Permute; fills -> Pointwise.

A Transpose is the first kernel of most plans: an NCHW float image becomes NHWC in the stored dtype.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from infer_server.engines.ir.graph import BATCH, Node, TensorType
from infer_server.engines.lowering.calls.aliasing import cuts_of, item_perm
from infer_server.engines.lowering.calls.body import write_body
from infer_server.engines.lowering.calls.broadcast import broadcast
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.calls.placement import Placement, as_one_item, items_stay
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from infer_server.engines.lowering.problems.elementwise import Pointwise
from infer_server.engines.lowering.problems.movement import Permute
from infer_server.engines.lowering.problems.view import FLOATS, View


@lowers("Slice", "Split")
def lower_cut(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    source, calls = node.inputs[0], []
    cuts = cuts_of(node, ctx.type(source), [ctx.type(output) for output in node.outputs])
    for output, cut in zip(node.outputs, cuts, strict=True):
        if cut is None:
            raise Refused(f"{node.op} along the batch, or with a negative step")
        if not ctx.placements.is_view(output, source):
            placement = ctx.placements[source]
            for part in cut:
                placement = placement.part(*part)
            calls.append(moved(ctx, node, source, placement, output, ctx.placements[output]))
    return calls


@lowers("Reshape", any_batch=True)
def lower_reshape(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a Reshape of tensors with gaps or different dtypes, viewed with common factors of both shapes."""
    source, output = node.inputs[0], node.outputs[0]
    x, y = ctx.placements[source], ctx.placements[output]
    if BATCH not in (x.items, y.items):
        x, y = as_one_item(x), as_one_item(y)
    elif not items_stay(ctx.type(source), ctx.type(output)):
        raise Refused("it reshapes the batch axis")
    seen, target = refined(x.view, y.view)
    return [moved(ctx, node, source, replace(x, view=seen), output, replace(y, view=target))]


@lowers("Transpose", any_batch=True)
def lower_transpose(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    name, output = node.inputs[0], node.outputs[0]
    source, target = ctx.placements[name], ctx.placements[output]
    axes: Sequence[int] | None = item_perm(node, ctx.type(name))
    if axes is None:        # moves a leading axis that is no batch: one item
        axes, source, target = node.attrs["perm"], as_one_item(source), as_one_item(target)
    seen = replace(source.view, shape=tuple(source.view.shape[a] for a in axes),
                   strides=tuple(source.view.strides[a] for a in axes))
    return [moved(ctx, node, name, replace(source, view=seen), output, target)]


@lowers("Expand")
def lower_expand(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    source, output = node.inputs[0], node.outputs[0]
    seen = replace(ctx.placements[source], view=broadcast(ctx, source, output))
    return [moved(ctx, node, source, seen, output, ctx.placements[output])]


@lowers("Pad")
def lower_pad(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower to a copy of the inside, and fills of a strip before and after along each axis."""
    if node.attrs.get("mode", "constant") != "constant":
        raise Refused("only constant padding is compiled")
    source, output = node.inputs[0], node.outputs[0]
    if ctx.placements.is_view(output, source):
        return []
    inside, whole, pads = ctx.placements[source], ctx.placements[output], node.attrs["pads"]
    rank = len(pads) // 2
    if pads[0] or pads[rank]:
        raise Refused("padding of the leading axis")
    target, strips = whole, []
    for axis, (before, after) in enumerate(zip(pads[1:rank], pads[rank + 1:], strict=True)):
        extent = inside.view.shape[axis]
        inside = inside.part(axis, max(-before, 0), extent - max(-after, 0))
        start, stop = max(before, 0), max(before, 0) + inside.view.shape[axis]
        strips += [whole.part(axis, 0, start)] * (start > 0)
        strips += [whole.part(axis, stop, whole.view.shape[axis])] * (stop < whole.view.shape[axis])
        target = target.part(axis, start, stop)
    value = as_stored(ctx.type(output), node.attrs.get("value", 0))
    return [moved(ctx, node, source, inside, output, target), *(filled(node, strip, value) for strip in strips)]


@lowers("BitCast")
def lower_bits(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower to a copy of the bytes."""
    x, y = (ctx.placements[name] for name in (node.inputs[0], node.outputs[0]))
    if x.view.size != y.view.size:
        raise Refused("its element sizes differ")
    return [copy_call(node, x, replace(y, view=replace(y.view, dtype=x.view.dtype)))]


def refined(x: View, y: View) -> tuple[View, View]:
    """Return both views with a common shape: [6, 4] and [2, 12] become [2, 3, 4].

    Raises Refused if the extents have no common factors, as [4, 3] and [6, 2].
    """
    left, right = ([(n, s) for n, s in zip(v.shape, v.strides, strict=True) if n > 1] for v in (x, y))
    parts = []          # (extent, stride in x, stride in y), innermost first
    while left and right:
        (n, a), (m, b) = left.pop(), right.pop()
        part = min(n, m)
        if n % part or m % part:
            raise Refused(f"{x.shape} and {y.shape} have no common factors")
        parts.append((part, a, b))
        left += [(n // part, a * part)] * (n > part)
        right += [(m // part, b * part)] * (m > part)
    shape, x_strides, y_strides = zip(*reversed(parts or [(1, x.size, y.size)]), strict=True)
    return replace(x, shape=shape, strides=x_strides), replace(y, shape=shape, strides=y_strides)


def copy_call(node: Node, source: Placement, target: Placement) -> ProblemCall:
    """Return a call that copies a tensor bit for bit. Both placements have the same shape and stored dtype."""
    return ProblemCall(node, Permute(source.view, target.view), (source,), (target,), {"program": []})


def moved(ctx: Context, node: Node, source: str, seen: Placement, output: str, target: Placement) -> ProblemCall:
    """Return a call that copies `source`, viewed as `seen`, to `output`, requantised if the stored forms differ."""
    if seen.view.dtype == target.view.dtype and ctx.type(source).quant == ctx.type(output).quant:
        return copy_call(node, seen, target)
    written = write_body(ctx, Node("Identity", (source,), (output,)), None)
    if written.program.instructions and any(placement.view.dtype not in FLOATS for placement in (seen, target)):
        raise Refused("only floats are converted by a copy")
    spec = Permute(seen.view, target.view, written.program, all(c.size == 1 for c in written.constants))
    return ProblemCall(node, spec, (seen,), (target,), {"program": written.constants})


def filled(node: Node, target: Placement, number: float) -> ProblemCall:
    if target.view.dtype not in FLOATS:
        raise Refused("only float tensors are filled")
    builder = ProgramBuilder(False)
    builder.add("max", number, number)
    spec = Pointwise((), target.view, builder.program(), uniform=True)
    return ProblemCall(node, spec, (), (target,), {"program": builder.constants})


def as_stored(tensor: TensorType, number: float) -> float:
    """Convert a real number to the tensor's stored form."""
    if tensor.quant is None:
        return float(number)
    return float(np.clip(np.rint(number / tensor.quant.scale[0] + tensor.quant.zero_point[0]), 0, 255))
