"""Pads of every mode: the inside copied, then a strip before and a strip after along each axis. A window over what is
padded with room to spare needs no test at its edges."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from engines.ir.counted import as_int
from engines.ir.graph import BATCH, Dim, Node
from engines.lowering.calls.calls import Call, Context, lowers_in_general
from engines.lowering.calls.nesting import NestWriter
from engines.lowering.calls.placement import Placement, as_one_item
from engines.lowering.nest.program import FLOATING, KINDS, Number, Term
from engines.lowering.problems.view import dense_view
from engines.ops.movement import Pad

Ranges = list[tuple[int, int]]      # of each axis, from and to


@lowers_in_general("Pad")
def lower_pad(ctx: Context, node: Node) -> Sequence[Call]:
    """Of a cut tensor, where pads are negative."""
    name, output = node.inputs[0], node.outputs[0]
    widths, mode = Pad.widths(node, len(ctx.type(name).shape)), node.attrs.get("mode", "constant")
    shape = ctx.type(name).shape

    def read(w: NestWriter, place: list[Term]) -> Term:
        for axis, (before, after) in enumerate(widths):
            if before or after:
                cut = max(-before, 0)
                extent = as_int(shape[axis]) - cut - max(-after, 0)
                index = place[axis] - max(before, 0)
                bounds = w.bounds(index)
                beside = not bounds or bounds[0] < 0 or bounds[1] >= extent
                place[axis] = (_padded(index, extent, mode, max(before, after)) if beside else index) + cut
        return w.at(name, place, outside=number_of(ctx, name, node.attrs.get("value", 0)))

    whole = ctx.placements[output]
    whole = whole if BATCH in shape else as_one_item(whole)
    return boxes(ctx, node, ctx.type(output).shape, widths, whole, read)


def boxes(ctx: Context, node: Node, shape: Sequence[Dim], widths: Sequence[tuple[int, int]], target: Placement,
          read: Callable[[NestWriter, list[Term]], Term]) -> list[Call]:
    """A nest for each part of a padded tensor; read: the element at a place of it."""
    extents = [as_int(extent) for extent in shape if extent != BATCH]
    sides = [width for width, extent in zip(widths, shape, strict=True) if extent != BATCH]
    calls = []
    for ranges in _parts(extents, sides):
        part = target
        for axis, (start, stop) in enumerate(ranges):
            part = part.part(axis, start, stop)
        rest = iter(ranges)
        places = [(0, 0) if extent == BATCH else next(rest) for extent in shape]
        lengths: list[Dim] = [BATCH if extent == BATCH else stop - start
                              for extent, (start, stop) in zip(shape, places, strict=True)]
        w = NestWriter(ctx, node, lengths)
        place = [index + start if start else index for index, (start, _) in zip(w.axes, places, strict=True)]
        calls.append(w.call(read(w, place), targets=[part]))
    return calls


def _parts(extents: Sequence[int], widths: Sequence[tuple[int, int]]) -> Iterator[Ranges]:
    """The inside, then the strips of each axis: as long as what is inside along those before it, whole along others."""
    inside = [(max(before, 0), extent - max(after, 0)) for extent, (before, after) in zip(extents, widths, strict=True)]
    yield inside
    whole = [(0, extent) for extent in extents]
    for axis, (start, stop) in enumerate(inside):
        for side in ((0, start), (stop, extents[axis])):
            if side[0] < side[1]:
                yield [*inside[:axis], side, *whole[axis + 1:]]


def _padded(index: Term, extent: int, mode: str, most: int) -> Term:
    """What stands for an index beside an axis."""
    if mode == "edge":
        return index.within(extent)
    if mode == "wrap":
        return index % extent
    if mode == "reflect":
        last = max(extent - 1, 1)
        if extent == 1:
            return index * 0
        if most >= extent:
            index = index % (2 * last)
            return index.at_most(-index + 2 * last)
        index = index.unary("abs")
        return index.at_most(-index + 2 * last)
    return index


def number_of(ctx: Context, name: str, value: float) -> Number:
    """A number of the dtype of a tensor."""
    kind = KINDS.get(ctx.placements[name].view.dtype, "f32")
    return float(value) if kind in FLOATING else int(value)


def padded(ctx: Context, node: Node, name: str, widths: Sequence[tuple[int, int]],
           fill: Number) -> tuple[Placement, tuple[Dim, ...], list[Call]]:
    """(where it lies, its shape, the nests that make it): a tensor with so much around it, in a buffer of its own."""
    source = ctx.type(name)
    shape = tuple(extent if extent == BATCH else as_int(extent) + before + after
                  for extent, (before, after) in zip(source.shape, widths, strict=True))
    own = tuple(as_int(extent) for extent in shape if extent != BATCH)
    view, dtype = None, ctx.placements[name].view.dtype
    if BATCH in shape:
        target = ctx.placements.scratch(f"{name}.padded", dense_view(dtype, own), BATCH)
        seen = target
    else:
        view = dense_view(dtype, own)
        target = ctx.placements.scratch(f"{name}.padded", view, 1)
        seen = replace(target, items=own[0], view=replace(view, shape=own[1:], strides=view.strides[1:],
                                                          item=view.strides[0]))

    def read(w: NestWriter, place: list[Term]) -> Term:
        moved = [index - before if before else index for index, (before, _) in zip(place, widths, strict=True)]
        return w.at(name, moved, outside=fill)

    return seen, shape, boxes(ctx, node, shape, widths, target, read)
