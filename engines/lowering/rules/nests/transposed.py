"""General rules for transposed windows over any number of axes: ConvTranspose, and Col2Im.

    y[p] = sum over t with p + pad - t * dilation = u * stride of x[u] * w[t]

There is a nest per phase of the outputs (engines/lowering/calls/phases.py), whose taps are all valid. With dilation, or
many phases, there is one nest with a test per tap.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

from infer_server.engines.ir.graph import Dim, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.calls.phases import Phase, phases_of
from infer_server.engines.lowering.nest.program import KINDS, Term
from infer_server.engines.lowering.rules.nests.padding import number_of, padded
from infer_server.engines.lowering.rules.nests.windows import in_group
from infer_server.engines.ops.window import Window

Element = Callable[["Transposed", Term, Sequence[Term]], Term]      # (nest, channel, tap along each axis) -> summand
MOST = 64           # most phases with a nest each


class Transposed:
    """Nests of a transposed window. The inner loops are `channels` and the taps."""

    def __init__(self, ctx: Context, node: Node, channels: Sequence[int] = ()) -> None:
        self.ctx, self.node, self.channels, self.x = ctx, node, channels, node.anchor.inputs[0]
        self.shape = ctx.type(node.outputs[0]).shape
        self.last = bool(node.anchor.attrs.get("channels_last"))
        self.first = 1 if self.last else 2      # first spatial axis
        self.extents = [as_int(extent) for extent in (self.shape[1:-1] if self.last else self.shape[2:])]
        self.window = Window.of(node.anchor, len(self.extents))
        self.sizes = [as_int(extent) for extent in ctx.type(self.x).shape[self.first:self.first + len(self.extents)]]
        self.image, self.seen = ctx.placements[self.x], ctx.type(self.x).shape
        self.before = [0] * len(self.extents)   # padding before the image
        self.indices: list[Term] = []           # indices into the image; empty without valid taps
        self.tests: list[Term] = []             # validity tests of a tap, for a single nest

    @property
    def _by_tests(self) -> bool:
        return set(self.window.dilations) != {1} or math.prod(self.window.strides) > MOST

    def calls(self, element: Element, bias: str = "") -> list[ProblemCall]:
        """Return the nests that sum `element`."""
        if self._by_tests:
            return [self._tested_nest(element, bias)]
        axes = [phases_of(kernel, stride, pad, extent) for kernel, stride, (pad, _), extent in zip(
            self.window.kernel, self.window.strides, self.window.pads, self.extents, strict=True)]
        made = self._in_padding(axes)
        return [*made, *(self._phase_nest(phases, element, bias) for phases in product(*axes))]

    def _in_padding(self, axes: Sequence[Sequence[Phase]]) -> list[ProblemCall]:
        """Return the nests that pad the image for reads outside of it."""
        widths = [(max(0, *(-phase.first for phase in phases)), max(0, *(phase.end - size for phase in phases)))
                  for phases, size in zip(axes, self.sizes, strict=True)]
        if not any(map(any, widths)):
            return []
        self.before = [before for before, _ in widths]
        around = [(0, 0), *widths, (0, 0)] if self.last else [(0, 0), (0, 0), *widths]
        self.image, self.seen, made = padded(self.ctx, self.node, self.x, around, number_of(self.ctx, self.x, 0))
        return made

    def _phase_nest(self, phases: Sequence[Phase], element: Element, bias: str) -> ProblemCall:
        """Return the nest of one phase along each axis. Phases without taps have the bias alone."""
        counts: list[Dim] = [phase.outputs for phase in phases]
        shape = [self.shape[0], *counts, self.shape[-1]] if self.last else [*self.shape[:2], *counts]
        taps = [len(phase.taps) for phase in phases]
        w = NestWriter(self.ctx, self.node, shape, (*self.channels, *taps) if all(taps) else ())
        target = w.target(self.node.outputs[0])
        own = self.first - w.batched            # first spatial axis of the item
        for i, phase in enumerate(phases):
            target = target.part(own + i, phase.start, self.extents[i], phase.step)
        self.w, self.channel = w, w.axes[-1 if self.last else 1]
        self.indices = []
        if all(taps):
            self.indices = [w.axes[self.first + i] + w.inner[len(self.channels) + i] + (phase.first + self.before[i])
                            for i, phase in enumerate(phases)]
        numbers = [tap * -phase.step + phase.taps[0] for tap, phase in zip(
            w.inner[len(self.channels):], phases, strict=False)]
        for i, phase in enumerate(phases):      # from here on these are indices of the result
            w.axes[self.first + i] = w.axes[self.first + i] * phase.step + phase.start
        return w.call(self._total(element, numbers, bias), targets=[target])

    def _tested_nest(self, element: Element, bias: str) -> ProblemCall:
        """Return a nest over all taps that tests whether they hit a pixel."""
        w = self.w = NestWriter(self.ctx, self.node, self.shape, (*self.channels, *self.window.kernel))
        self.channel, taps = w.axes[-1 if self.last else 1], w.inner[len(self.channels):]
        for i, (stride, dilation, (before, _)) in enumerate(zip(
                self.window.strides, self.window.dilations, self.window.pads, strict=True)):
            spot = w.axes[self.first + i] + before - taps[i] * dilation
            if stride > 1:
                self.tests += [(spot % stride).equals(0), spot >= 0]
                spot = spot.binary("div", stride)
            self.indices.append(spot)
        return w.call(self._total(element, taps, bias))

    def _total(self, element: Element, taps: Sequence[Term], bias: str) -> Term:
        w = self.w
        if self.indices:
            value = w.reduce("sum", element(self, self.channel, taps))
        else:
            value = w.constant(number_of(self.ctx, self.x, 0), KINDS[self.image.view.dtype])
        if bias:
            value = value + w.at(bias, [self.channel])
        return w.finished(value)

    def pixel(self, channel: Term) -> Term:
        item, w = self.w.axes[0], self.w
        order = [item, *self.indices, channel] if self.last else [item, channel, *self.indices]
        if not self._by_tests:
            return w.at_placement(self.image, self.seen, order)
        value = w.at(self.x, order, number_of(self.ctx, self.x, 0))
        return w.where(w.both(self.tests), value, value.like(0)) if self.tests else value


@fallback_rule("ConvTranspose")
def lower_transposed(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a ConvTranspose: x[n, c, u] * w[c, o, t] is added to y[n, o, p]."""
    _, weights, *bias = node.anchor.inputs
    count, each, *_ = map(int, ctx.type(weights).shape)
    groups = node.anchor.attrs.get("group", 1)

    def element(t: Transposed, channel: Term, taps: Sequence[Term]) -> Term:
        source = in_group(channel, each * groups, groups, count // groups) + t.w.inner[0]
        return t.pixel(source) * t.w.at(weights, [source, channel if groups == 1 else channel % each, *taps])

    return Transposed(ctx, node, (count // groups,)).calls(element, bias[0] if bias else "")


@fallback_rule("Col2Im")
def lower_columns(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a Col2Im: x[n, (c, t), u] is added to y[n, c, p]."""
    kernel = node.attrs["kernel_shape"]

    def element(t: Transposed, channel: Term, taps: Sequence[Term]) -> Term:
        column = channel * math.prod(kernel)
        for axis, tap in enumerate(taps):
            column = column + tap * math.prod(kernel[axis + 1:])
        return t.pixel(column)

    return Transposed(ctx, node).calls(element)
