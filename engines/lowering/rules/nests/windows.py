"""Windows over any number of axes, in either layout, of any dtype, with weights that are computed at run time."""
from __future__ import annotations

import math
from collections.abc import Sequence

from engines.ir.graph import Node
from engines.lowering.calls.calls import Call, Context, Refused, lowers_in_general
from engines.lowering.calls.nesting import NestWriter
from engines.lowering.nest import functions
from engines.lowering.nest.program import FLOATING, Number, Term
from engines.ops.window import Window

LOWEST = {"f32": -math.inf, "f64": -math.inf, "i32": -2 ** 31, "i64": -2 ** 63, "u64": 0, "i1": 0}


class Sliding:
    """The nest of a window: its outer loops are the output's axes, the inner ones `channels` and the taps."""

    def __init__(self, ctx: Context, node: Node, channels: Sequence[int] = ()) -> None:
        anchor = node.anchor
        shape = ctx.type(node.outputs[0]).shape
        self.last, self.rank = bool(anchor.attrs.get("channels_last")), len(shape) - 2
        self.window = Window.of(anchor, self.rank)
        self.w = NestWriter(ctx, node, shape, (*channels, *self.window.kernel))
        self.x = anchor.inputs[0]
        self.item, *axes = self.w.axes
        self.channel, self.places = (axes[-1], axes[:-1]) if self.last else (axes[0], axes[1:])
        self.taps = self.w.inner[len(channels):]

    def size(self, axis: int) -> int:
        """Of the image, along one of its axes."""
        return self.w.extent(self.x, axis + (1 if self.last else 2))

    def pixel(self, channel: Term, places: Sequence[Term], outside: Number) -> Term:
        order = [self.item, *places, channel] if self.last else [self.item, channel, *places]
        return self.w.at(self.x, order, outside)

    def seen(self) -> list[Term]:
        """What the tap sees along each axis: place * stride + tap * dilation - padding."""
        window = self.window
        return [place * stride + tap * dilation - before for place, stride, tap, dilation, (before, _) in zip(
            self.places, window.strides, self.taps, window.dilations, window.pads, strict=True)]

    def inside(self, places: Sequence[Term], padded: bool) -> list[Term]:
        """The tests of whether a place is in the image, or in its padding; none where that is known."""
        tests = []
        for axis, place in enumerate(places):
            before, after = self.window.pads[axis] if padded else (0, 0)
            bounds = self.w.bounds(place)
            if not bounds or bounds[0] < -before:
                tests.append(place >= -before)
            if not bounds or bounds[1] >= self.size(axis) + after:
                tests.append(place < self.size(axis) + after)
        return tests


def _in_group(channel: Term, count: int, groups: int, each: int) -> Term:
    """The first channel of the group of an output channel; count: of output channels, each: of a group's inputs."""
    if groups == 1:
        return channel * 0
    return (channel // (count // groups)) * each


@lowers_in_general("Conv", "ConvInteger")
def lower_conv(ctx: Context, node: Node) -> Sequence[Call]:
    anchor = node.anchor
    x, weights, *others = anchor.inputs
    count, each, *_ = ctx.type(weights).shape
    s = Sliding(ctx, node, (int(each),))
    groups = anchor.attrs.get("group", 1)
    channel = _in_group(s.channel, int(count), groups, int(each)) + s.w.inner[0]
    places = s.seen()
    pixel, weight = s.pixel(channel, places, 0), s.w.at(weights, [s.channel, s.w.inner[0], *s.taps])
    if anchor.op == "ConvInteger":
        zero = s.w.constant(0, "i64")
        if others[:1] and others[0]:
            away = pixel - s.w.at(others[0], [zero] * len(ctx.type(others[0]).shape))
            tests = s.inside(places, padded=False)
            pixel = s.w.where(s.w.both(tests), away, 0) if tests else away
        if others[1:] and others[1]:
            shape = ctx.type(others[1]).shape
            weight = weight - s.w.at(others[1], [zero if extent == 1 else s.channel for extent in shape])
    value = s.w.reduce("sum", pixel * weight)
    if anchor.op == "Conv" and others and others[0]:
        value = value + s.w.at(others[0], [s.channel])
    return [s.w.call(s.w.finished(value))]


@lowers_in_general("ConvTranspose")
def lower_transposed(ctx: Context, node: Node) -> Sequence[Call]:
    """Each output pixel sums what the taps bring there: of those whose place is a multiple of the stride."""
    anchor = node.anchor
    _, weights, *bias = anchor.inputs
    count, each, *_ = map(int, ctx.type(weights).shape)
    groups = anchor.attrs.get("group", 1)
    s = Sliding(ctx, node, (count // groups,))
    window, places, tests = s.window, [], []
    for place, stride, tap, dilation, (before, _) in zip(s.places, window.strides, s.taps, window.dilations,
                                                         window.pads, strict=True):
        spot = place + before - tap * dilation
        if stride > 1:
            tests += [(spot % stride).equals(0), spot >= 0]
            spot = spot.binary("div", stride)
        places.append(spot)
    channel = _in_group(s.channel, each * groups, groups, count // groups) + s.w.inner[0]
    pixel = s.pixel(channel, places, 0)
    pixel = s.w.where(s.w.both(tests), pixel, 0) if tests else pixel
    of_group = s.channel if groups == 1 else s.channel % each
    value = s.w.reduce("sum", pixel * s.w.at(weights, [channel, of_group, *s.taps]))
    if bias and bias[0]:
        value = value + s.w.at(bias[0], [s.channel])
    return [s.w.call(s.w.finished(value))]


# ---- pools
@lowers_in_general("MaxPool")
def lower_max_pool(ctx: Context, node: Node) -> Sequence[Call]:
    s = Sliding(ctx, node)
    places = s.seen()
    pixel = s.pixel(s.channel, places, 0)
    tests = s.inside(places, padded=False)
    pixel = s.w.where(s.w.both(tests), pixel, LOWEST[pixel.kind]) if tests else pixel
    if node.body:
        raise Refused("its body is not written by a nest")
    if not any(node.outputs[1:]):
        return [s.w.call(s.w.reduce("max", pixel), *(None for _ in node.outputs[1:]))]
    if s.last:
        raise Refused("the numbers of pixels are those of channels first")
    return [s.w.call(s.w.reduce("max", pixel), _numbers(s, node, s.w.reduce("first_max", pixel)))]


def _numbers(s: Sliding, node: Node, tap: Term) -> Term:
    """Which element of the flattened x a tap sees; storage_order 1 flattens images by column."""
    sizes, digits = [s.size(axis) for axis in range(s.rank)], []
    for axis in reversed(range(s.rank)):
        digits.append(tap % s.window.kernel[axis])
        tap = tap // s.window.kernel[axis]
    number = s.w.constant(0, "i64")
    order = range(s.rank) if not node.attrs.get("storage_order") else reversed(range(s.rank))
    digits.reverse()
    for axis in order:
        place = digits[axis] * s.window.dilations[axis] + s.places[axis] * s.window.strides[axis]
        number = number * sizes[axis] + (place - s.window.pads[axis][0])
    image = s.item * s.w.extent(s.x, 1) + s.channel
    return image * math.prod(sizes) + number


@lowers_in_general("AveragePool", "LpPool")
def lower_average_pool(ctx: Context, node: Node) -> Sequence[Call]:
    s, anchor = Sliding(ctx, node), node.anchor
    places = s.seen()
    pixel = s.pixel(s.channel, places, 0)
    if anchor.op == "LpPool":
        return [s.w.call(s.w.finished(_norm(s, pixel, anchor.attrs.get("p", 2))))]
    if pixel.kind not in FLOATING:
        raise Refused("a mean of integers")
    tests = s.inside(places, padded=bool(anchor.attrs.get("count_include_pad")))
    total = s.w.reduce("sum", pixel)
    if not tests:
        return [s.w.call(s.w.finished(total * (1 / math.prod(s.window.kernel))))]
    seen = s.w.where(s.w.both(tests), pixel.like(1.0), 0.0)
    return [s.w.call(s.w.finished(total / s.w.reduce("sum", seen)))]


def _norm(s: Sliding, pixel: Term, p: int) -> Term:
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
