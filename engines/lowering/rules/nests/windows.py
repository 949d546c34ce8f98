"""General rules for windows over any number of axes, in either layout and any dtype, with run-time weights."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from infer_server.engines.ir.graph import Dim, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.calls.placement import Placement
from infer_server.engines.lowering.nest import functions
from infer_server.engines.lowering.nest.program import FLOATING, KINDS, Number, Term
from infer_server.engines.lowering.problems.view import dense_view
from infer_server.engines.lowering.rules.nests.padding import padded
from infer_server.engines.ops.window import Window


def lowest(dtype: str) -> Number:
    """Return the lowest number of a stored dtype."""
    return -math.inf if KINDS[dtype] in FLOATING else 0 if dtype == "bool" else int(np.iinfo(dtype).min)


class Sliding:
    """Nest of a window: its outer loops are the output's axes, the inner ones `channels` and the taps."""

    def __init__(self, ctx: Context, node: Node, channels: Sequence[int] = ()) -> None:
        anchor = node.anchor
        shape = ctx.type(node.outputs[0]).shape
        self.last, self.rank = bool(anchor.attrs.get("channels_last")), len(shape) - 2
        self.window = Window.of(anchor, self.rank)
        self.w = NestWriter(ctx, node, shape, (*channels, *self.window.kernel))
        self.x = anchor.inputs[0]
        self.before: list[ProblemCall] = []  # calls that pad the image
        self._image: tuple[Placement, tuple[Dim, ...]] | None = None
        self.item, *axes = self.w.axes
        self.channel, self.coordinates = (axes[-1], axes[:-1]) if self.last else (axes[0], axes[1:])
        self.taps = self.w.inner[len(channels):]

    def size(self, axis: int) -> int:
        """Return the extent of the image along a spatial axis."""
        return self.w.extent(self.x, axis + (1 if self.last else 2))

    def padded(self, fill: Number) -> None:
        """Read pixels from a padded copy of the image from now on, if windows exceed it."""
        window, ends = self.window, []
        shape = self.w.ctx.type(self.w.node.outputs[0]).shape
        outputs = shape[1:-1] if self.last else shape[2:]
        for axis, (before, _) in enumerate(window.pads):
            end = (as_int(outputs[axis]) - 1) * window.strides[axis] + window.spans[axis]
            ends.append((before, max(end - before - self.size(axis), 0)))
        if any(map(any, ends)):
            widths = [(0, 0), *ends, (0, 0)] if self.last else [(0, 0), (0, 0), *ends]
            placement, shape, self.before = padded(self.w.ctx, self.w.node, self.x, widths, fill)
            self._image = placement, shape

    def pixel(self, channel: Term, coordinates: Sequence[Term], outside: Number) -> Term:
        if self._image is not None:
            coordinates = [coordinate + before for coordinate,
                           (before, _) in zip(coordinates, self.window.pads, strict=True)]
        order = [self.item, *coordinates, channel] if self.last else [self.item, channel, *coordinates]
        if self._image is not None:
            return self.w.at_placement(*self._image, order)
        return self.w.at(self.x, order, outside)

    def tap_coordinates(self) -> list[Term]:
        """Return the coordinate of the tap along each axis: place * stride + tap * dilation - padding."""
        window = self.window
        return [coordinate * stride + tap * dilation - before for coordinate, stride, tap, dilation, (before, _) in zip(
            self.coordinates, window.strides, self.taps, window.dilations, window.pads, strict=True)]

    def first_coordinates(self) -> list[Term]:
        """Return the coordinate of the first tap inside the image along each axis."""
        found = []
        for coordinate, stride, dilation, (before, _) in zip(self.coordinates, self.window.strides,
                                                             self.window.dilations, self.window.pads, strict=True):
            start = coordinate * stride - before
            found.append(start + ((start * -1 + (dilation - 1)) // dilation).at_least(0) * dilation)
        return found

    def inside(self, coordinates: Sequence[Term]) -> list[Term]:
        """Return the tests that coordinates are inside the image; none for those that always are."""
        tests = []
        for axis, coordinate in enumerate(coordinates):
            bounds = self.w.bounds(coordinate)
            if not bounds or bounds[0] < 0:
                tests.append(coordinate >= 0)
            if not bounds or bounds[1] >= self.size(axis):
                tests.append(coordinate < self.size(axis))
        return tests

    def tap_count(self, padding: bool) -> Term | None:
        """Return the number of taps inside the image or its padding, or None if all always are."""
        count: Term | None = None
        window = self.window
        for axis, coordinate in enumerate(self.coordinates):
            kernel, dilation, (before, after) = window.kernel[axis], window.dilations[axis], window.pads[axis]
            start = coordinate * window.strides[axis] - before
            first, end = (-before, self.size(axis) + after) if padding else (0, self.size(axis))
            bounds = self.w.bounds(start)
            if bounds and bounds[0] >= first and bounds[1] + (kernel - 1) * dilation < end:
                least, most = start * 0, start * 0 + (kernel - 1)
            else:
                least = (start * -1 + (first + dilation - 1)) // dilation
                least, most = least.at_least(0), ((start * -1 + (end - 1)) // dilation).at_most(kernel - 1)
            seen = most - least + 1
            count = seen if count is None else count * seen
        return None if count is None or count.linear is not None else count


def _transposed_weight(s: Sliding, name: str) -> Term:
    """Return a weight, read from a copy with the output channels innermost, as in the result."""
    extents = [as_int(extent) for extent in s.w.ctx.type(name).shape]
    view = dense_view(s.w.ctx.placements[name].view.dtype, (*extents[1:], extents[0]))
    target = s.w.ctx.placements.scratch(f"{name}.turned", view, 1)
    w = NestWriter(s.w.ctx, s.w.node, view.shape)
    s.before.append(w.call(w.at(name, [w.axes[-1], *w.axes[:-1]]), targets=[target]))
    lying = replace(target, items=extents[1], view=replace(view, shape=view.shape[1:], strides=view.strides[1:],
                                                           item=view.strides[0]))
    return s.w.at_placement(lying, view.shape, [s.w.inner[0], *s.taps, s.channel])


def in_group(channel: Term, count: int, groups: int, each: int) -> Term:
    """Return the first input channel of an output channel's group.

    Parameters
    ----------
    channel : Term
        Output channel.
    count : int
        Number of output channels.
    groups : int
        Number of groups.
    each : int
        Input channels per group.
    """
    if groups == 1:
        return channel * 0
    return (channel // (count // groups)) * each


@fallback_rule("Conv", "ConvInteger")
def lower_conv(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    anchor = node.anchor
    x, weights, *others = anchor.inputs
    count, each, *_ = ctx.type(weights).shape
    s = Sliding(ctx, node, (as_int(each),))
    groups = anchor.attrs.get("group", 1)
    channel = in_group(s.channel, as_int(count), groups, as_int(each)) + s.w.inner[0]
    coordinates = s.tap_coordinates()
    if anchor.op == "Conv":
        s.padded(0)
    pixel = s.pixel(channel, coordinates, 0)
    weight = _transposed_weight(s, weights) if s.last and groups == 1 and pixel.kind in FLOATING else s.w.at(
        weights, [s.channel, s.w.inner[0], *s.taps])
    if anchor.op == "ConvInteger":
        zero = s.w.constant(0, "i64")
        if others[:1] and others[0]:
            away = pixel - s.w.at(others[0], [zero] * len(ctx.type(others[0]).shape))
            tests = s.inside(coordinates)
            pixel = s.w.where(s.w.both(tests), away, 0) if tests else away
        if others[1:] and others[1]:
            shape = ctx.type(others[1]).shape
            weight = weight - s.w.at(others[1], [zero if extent == 1 else s.channel for extent in shape])
    value = s.w.reduce("sum", pixel * weight)
    if anchor.op == "Conv" and others and others[0]:
        value = value + s.w.at(others[0], [s.channel])
    return [*s.before, s.w.call(s.w.finished(value))]


# ---- pools
@fallback_rule("MaxPool")
def lower_max_pool(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    s = Sliding(ctx, node)
    coordinates = s.tap_coordinates()
    if node.body:
        raise Refused("a nest does not support its fused body")
    fill = lowest(ctx.placements[s.x].view.dtype)
    s.padded(fill)
    pixel = s.pixel(s.channel, coordinates, fill)
    if not any(node.outputs[1:]):
        return [*s.before, s.w.call(s.w.reduce("max", pixel), *(None for _ in node.outputs[1:]))]
    if s.last:
        raise Refused("indices of pixels need channels first")
    begins = s.first_coordinates()
    first, most = s.pixel(s.channel, begins, fill), s.w.reduce("max", pixel)
    beats = most > first        # false if the first pixel is NaN
    found = [s.w.where(beats, later, begin)
             for later, begin in zip(_coordinates_of(s, s.w.reduce("first_max", pixel)), begins, strict=True)]
    return [*s.before, s.w.call(s.w.where(beats, most, first), _number(s, node, found))]


def _coordinates_of(s: Sliding, tap: Term) -> list[Term]:
    """Return the coordinates of a tap, given its number."""
    seen = []
    for axis in reversed(range(s.rank)):
        coordinate = (tap % s.window.kernel[axis] * s.window.dilations[axis]
                      + s.coordinates[axis] * s.window.strides[axis])
        seen.append(coordinate - s.window.pads[axis][0])
        tap = tap // s.window.kernel[axis]
    return seen[::-1]


def _number(s: Sliding, node: Node, coordinates: Sequence[Term]) -> Term:
    """Return the index into flattened x; storage_order 1 is column-major within images."""
    sizes = [s.size(axis) for axis in range(s.rank)]
    number = s.w.constant(0, "i64")
    for axis in range(s.rank) if not node.attrs.get("storage_order") else reversed(range(s.rank)):
        number = number * sizes[axis] + coordinates[axis]
    image = s.item * s.w.extent(s.x, 1) + s.channel
    return image * math.prod(sizes) + number


@fallback_rule("AveragePool", "LpPool")
def lower_average_pool(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    s, anchor = Sliding(ctx, node), node.anchor
    coordinates = s.tap_coordinates()
    s.padded(0)
    pixel = s.pixel(s.channel, coordinates, 0)
    if anchor.op == "LpPool":
        return [*s.before, s.w.call(s.w.finished(_norm(s, pixel, anchor.attrs.get("p", 2))))]
    if pixel.kind not in FLOATING:
        raise Refused("a mean of integers")
    total, count = s.w.reduce("sum", pixel), s.tap_count(bool(anchor.attrs.get("count_include_pad")))
    if count is None:
        return [*s.before, s.w.call(s.w.finished(total * (1 / math.prod(s.window.kernel))))]
    return [*s.before, s.w.call(s.w.finished(total / count.to(total.kind)))]


def _norm(s: Sliding, pixel: Term, p: int) -> Term:
    if p < 1:
        raise Refused(f"there is no norm of p = {p}")
    size = pixel.unary("abs")
    if p == 1:
        return s.w.reduce("sum", size)
    if p == 2:
        return s.w.reduce("sum", size * size).unary("sqrt")
    powered = size
    for _ in range(int(p) - 1):
        powered = powered * size
    total = s.w.reduce("sum", powered).to("f64")
    return functions.power(total, total.like(1 / p)).to(pixel.kind)
