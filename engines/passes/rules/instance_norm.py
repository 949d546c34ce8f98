"""Lower InstanceNormalization: to norms of rows on channels-first images, else to means over images.

    InstanceNormalization(x, g, b) = d * (g / sqrt(mean(d * d) + epsilon)) + b,  d = x - mean(x)      [N, C, ...]
                                   = LayerNormalization(x as [N, C, pixels], g as [C, 1], b as [C, 1])

GroupNorm is exported in this form too, between Reshapes to [N, groups, ...] and back.
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.graph import Dim
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, P, Rule, Value


class InstanceNorm(Rule):
    """Lower an InstanceNormalization after layouts are chosen."""
    pattern = P("InstanceNormalization", Value("x"), Value("scale"), Value("bias"))

    def rewrite(self, match: Match, draft: Draft) -> None:
        shape = match.type.shape
        inner = (1,) * (len(shape) - 2)
        if match.root.attrs.get("channels_last"):
            _write_out(match, draft, tuple(range(1, len(shape) - 1)), (-1,))
        else:
            _normalise_rows(match, draft, shape, (-1, *inner))


def _normalise_rows(match: Match, draft: Draft, shape: tuple[Dim, ...], of_channels: tuple[int, ...]) -> None:
    pixels = int(np.prod([int(extent) for extent in shape[2:]]))    # a norm's kernel has a fixed width
    rows = draft.node("Reshape", [match.value("x")], {"shape": (*shape[:2], pixels)})
    attrs = {"axis": 2, "epsilon": _epsilon(match)}
    if all(match.value(name) in match.graph.constants for name in ("scale", "bias")):
        constants = [_for_channels(match, draft, name, (-1, 1)) for name in ("scale", "bias")]
        draft.finish_view("Reshape", draft.node("LayerNormalization", [rows, *constants], attrs))
        return
    one = draft.constant("one", np.ones(1, match.type.dtype))
    image = draft.node("Reshape", [draft.node("LayerNormalization", [rows, one], attrs)], {"shape": shape})
    scale, bias = (_for_channels(match, draft, name, of_channels) for name in ("scale", "bias"))
    draft.finish("Add", [draft.node("Mul", [image, scale]), bias])


def _write_out(match: Match, draft: Draft, axes: tuple[int, ...], of_channels: tuple[int, ...]) -> None:
    x, over = match.value("x"), {"axes": axes, "keepdims": 1}
    scale, bias = (_for_channels(match, draft, name, of_channels) for name in ("scale", "bias"))
    epsilon = draft.constant("epsilon", np.full(1, _epsilon(match), match.type.dtype))

    mean = draft.node("ReduceMean", [x], over)
    d = draft.node("Sub", [x, mean])
    variance = draft.node("ReduceMean", [draft.node("Mul", [d, d])], over)
    deviation = draft.node("Sqrt", [draft.node("Add", [variance, epsilon])])
    factor = draft.node("Div", [scale, deviation])
    draft.finish("Add", [draft.node("Mul", [d, factor]), bias])


def _epsilon(match: Match) -> float:
    return float(match.root.attrs.get("epsilon", 1e-5))


def _for_channels(match: Match, draft: Draft, which: str, shape: tuple[int, ...]) -> str:
    """Return the scale or bias, one number per channel, in a shape that broadcasts to the image."""
    name = match.value(which)
    if name in match.graph.constants:
        return draft.constant(which, match.constant(which).reshape(shape))
    (channels,) = match.shape(name)
    return draft.node("Reshape", [name], {"shape": tuple(channels if extent == -1 else extent for extent in shape)})
