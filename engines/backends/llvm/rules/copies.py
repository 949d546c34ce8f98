"""What only moves elements: Slice and Split that are no views, Expand, Pad -> Permute; what is filled -> Pointwise."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engines.backends.llvm.calls import Call, Context, Refused, broadcast, copy_node, lowers, write_body
from engines.backends.llvm.kernels.layout import Permute
from engines.backends.llvm.kernels.pointwise import Pointwise
from engines.backends.llvm.places import Place, cuts_of
from engines.backends.llvm.program import ProgramBuilder
from engines.backends.llvm.rules.pointwise import FLOATS
from engines.ir import Node, TensorType


@lowers("Slice", "Split")
def lower_cut(ctx: Context, node: Node) -> Sequence[Call]:
    source, calls = node.inputs[0], []
    cuts = cuts_of(node, ctx.type(source), [ctx.type(output) for output in node.outputs])
    for output, cut in zip(node.outputs, cuts, strict=True):
        if cut is None:
            raise Refused(f"{node.op} of the leading axis, or backwards")
        if not ctx.places.is_view(output, source):
            place = ctx.places[source]
            for part in cut:
                place = place.part(*part)
            calls.append(moved(ctx, node, source, place, output, ctx.places[output]))
    return calls


@lowers("Expand")
def lower_expand(ctx: Context, node: Node) -> Sequence[Call]:
    source, output = node.inputs[0], node.outputs[0]
    seen = replace(ctx.places[source], view=broadcast(ctx, source, output))
    return [moved(ctx, node, source, seen, output, ctx.places[output])]


@lowers("Pad")
def lower_pad(ctx: Context, node: Node) -> Sequence[Call]:
    """The inside copied, then a strip before and a strip after along each axis filled."""
    if node.attrs.get("mode", "constant") != "constant":
        raise Refused("only padding by a constant is compiled")
    source, output = node.inputs[0], node.outputs[0]
    inside, whole, pads = ctx.places[source], ctx.places[output], node.attrs["pads"]
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


def moved(ctx: Context, node: Node, source: str, seen: Place, output: str, target: Place) -> Call:
    """Tensor `source`, as it is seen, copied to where `output` lies; requantised where the two are stored otherwise."""
    written = write_body(ctx, copy_node(source, output), None)
    if written.program.instructions and any(place.view.dtype not in FLOATS for place in (seen, target)):
        raise Refused("only floats are converted on the way")
    spec = Permute(seen.view, target.view, written.program, all(c.size == 1 for c in written.constants))
    return Call(node, spec, (seen,), (target,), {"program": written.constants})


def filled(node: Node, target: Place, number: float) -> Call:
    if target.view.dtype not in FLOATS:
        raise Refused("only floats are filled")
    builder = ProgramBuilder(False)
    builder.add("max", number, number)
    spec = Pointwise((), target.view, builder.program(), uniform=True)
    return Call(node, spec, (), (target,), {"program": builder.constants})


def as_stored(tensor: TensorType, number: float) -> float:
    """A real number as an element of the tensor."""
    if tensor.quant is None:
        return float(number)
    return float(np.clip(np.rint(number / tensor.quant.scale[0] + tensor.quant.zero_point[0]), 0, 255))
