"""Replace a padded 1x1 convolution by an unpadded one: its outputs in the padding equal its bias.

    Conv(x, w, b, pads=p, strides=s) = Pad(Conv(x[first:last + 1], w, strides=s), q) + b
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.passes.rewriting.facts import pads, spatial
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, No, P, Rule, Value


@dataclass(frozen=True)
class _OutputAxis:
    """Outputs along one axis: `before` and `after` of them read padding, `count` read x from `first` to `last`."""
    before: int
    count: int
    after: int
    first: int
    last: int


def _axis(extent: int, outputs: int, pad: int, stride: int) -> _OutputAxis:
    before = min(-(-pad // stride), outputs)
    count = max(min((extent - 1 + pad) // stride + 1, outputs) - before, 0)
    first = before * stride - pad
    return _OutputAxis(before, count, outputs - before - count, first, first + max(count - 1, 0) * stride)


class PaddedPointwiseConv(Rule):
    pattern = P("Conv", Value("x"), Value("w"))

    def check(self, match: Match) -> bool | No:
        taps = match.shape(match.value("w"))[2:]
        if set(taps) != {1} or not any(pads(match.root, len(taps))):
            return False
        if any(name and not match.graph.is_constant(name) for name in match.root.inputs[2:]):
            return No("its bias is computed at run time")
        if not all(isinstance(extent, int) for extent in match.shape(match.value("x"))[2:]):
            return No("its extents are known at run time only")
        return all(axis.count for axis in self._axes(match)) or No("all its outputs are padding")

    def rewrite(self, match: Match, draft: Draft) -> None:
        conv, axes = match.root, self._axes(match)
        rank = len(axes)
        x = draft.node("Slice", [match.value("x")], {
            "axes": tuple(range(2, 2 + rank)), "starts": tuple(axis.first for axis in axes),
            "ends": tuple(axis.last + 1 for axis in axes), "steps": (1,) * rank})
        y = draft.node("Conv", [x, match.value("w")], {**conv.attrs, "pads": (0,) * (2 * rank)})
        widths = (0, 0, *(axis.before for axis in axes), 0, 0, *(axis.after for axis in axes))
        attrs = {"pads": widths, "mode": "constant", "value": 0.0}
        if not any(conv.inputs[2:]):
            draft.finish("Pad", [y], attrs)
            return
        bias = match.graph.constants[conv.inputs[2]]
        column = draft.constant("border", np.reshape(bias, (-1, *(1,) * rank)))
        draft.finish("Add", [draft.node("Pad", [y], attrs), column])

    def _axes(self, match: Match) -> list[_OutputAxis]:
        conv, extents = match.root, [as_int(extent) for extent in match.shape(match.value("x"))[2:]]
        made = [as_int(extent) for extent in match.shape(conv.outputs[0])[2:]]
        before, strides = pads(conv, len(extents)), spatial(conv, len(extents), "strides", 1)
        return [_axis(*each) for each in zip(extents, made, before, strides, strict=False)]
