"""General rules for Pad in every mode, and padded copies of images, whose windows need no bounds tests.

The inside is copied first, then a strip before and a strip after along each axis.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from infer_server.engines.ir.graph import BATCH, Dim, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.calls.placement import Placement, as_one_item
from infer_server.engines.lowering.nest.program import FLOATING, KINDS, Number, Term
from infer_server.engines.lowering.problems.view import dense_view
from infer_server.engines.ops.movement import Pad

Ranges = list[tuple[int, int]]      # [start, stop) along each axis


@fallback_rule("Pad")
def lower_pad(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a Pad. Negative pads crop first."""
    name, output = node.inputs[0], node.outputs[0]
    widths, mode = Pad.widths(node, len(ctx.type(name).shape)), node.attrs.get("mode", "constant")
    shape = ctx.type(name).shape

    def read(w: NestWriter, indices: list[Term]) -> Term:
        for axis, (before, after) in enumerate(widths):
            if before or after:
                cut = max(-before, 0)
                extent = as_int(shape[axis]) - cut - max(-after, 0)
                index = indices[axis] - max(before, 0)
                bounds = w.bounds(index)
                outside = not bounds or bounds[0] < 0 or bounds[1] >= extent
                indices[axis] = (_padded(index, extent, mode, max(before, after)) if outside else index) + cut
        return w.at(name, indices, outside=number_of(ctx, name, node.attrs.get("value", 0)))

    whole = ctx.placements[output]
    whole = whole if BATCH in shape else as_one_item(whole)
    return boxes(ctx, node, ctx.type(output).shape, widths, whole, read)


def boxes(ctx: Context, node: Node, shape: Sequence[Dim], widths: Sequence[tuple[int, int]], target: Placement,
          read: Callable[[NestWriter, list[Term]], Term]) -> list[ProblemCall]:
    """Return a nest per part of a padded tensor.

    `read` returns the element at these indices of the padded tensor.
    """
    extents = [as_int(extent) for extent in shape if extent != BATCH]
    sides = [width for width, extent in zip(widths, shape, strict=True) if extent != BATCH]
    calls = []
    for ranges in _parts(extents, sides):
        part = target
        for axis, (start, stop) in enumerate(ranges):
            part = part.part(axis, start, stop)
        rest = iter(ranges)
        item_ranges = [(0, 0) if extent == BATCH else next(rest) for extent in shape]
        lengths: list[Dim] = [BATCH if extent == BATCH else stop - start
                              for extent, (start, stop) in zip(shape, item_ranges, strict=True)]
        w = NestWriter(ctx, node, lengths)
        indices = [index + start if start else index for index, (start, _) in zip(w.axes, item_ranges, strict=True)]
        calls.append(w.call(read(w, indices), targets=[part]))
    return calls


def _parts(extents: Sequence[int], widths: Sequence[tuple[int, int]]) -> Iterator[Ranges]:
    """Yield the inside, then strips along each axis, as long as the inside on earlier axes and whole on later ones."""
    inside = [(max(before, 0), extent - max(after, 0)) for extent, (before, after) in zip(extents, widths, strict=True)]
    yield inside
    whole = [(0, extent) for extent in extents]
    for axis, (start, stop) in enumerate(inside):
        for side in ((0, start), (stop, extents[axis])):
            if side[0] < side[1]:
                yield [*inside[:axis], side, *whole[axis + 1:]]


def _padded(index: Term, extent: int, mode: str, most: int) -> Term:
    """Return the source index of an index outside the axis."""
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
    """Convert a number to the arithmetic of a tensor's dtype."""
    kind = KINDS.get(ctx.placements[name].view.dtype, "f32")
    return float(value) if kind in FLOATING else int(value)


def padded(ctx: Context, node: Node, name: str, widths: Sequence[tuple[int, int]],
           fill: Number) -> tuple[Placement, tuple[Dim, ...], list[ProblemCall]]:
    """Copy a tensor with padding to its own buffer, and return the placement, its shape and the nests."""
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

    def read(w: NestWriter, indices: list[Term]) -> Term:
        moved = [index - before if before else index for index, (before, _) in zip(indices, widths, strict=True)]
        return w.at(name, moved, outside=fill)

    return seen, shape, boxes(ctx, node, shape, widths, target, read)
