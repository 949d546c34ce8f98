"""Norms over images by means over images, which have kernels.

    InstanceNormalization(x, g, b) = d * (g / sqrt(mean(d * d) + epsilon)) + b,  d = x - mean(x)      [N, C, ...]

GroupNorm comes as one too, between Reshapes to [N, groups, ...] and back.
"""
from __future__ import annotations

import numpy as np

from engines.passes.rewriting.rewrite import Constant, Draft, Match, P, Rule, Value


class InstanceNorm(Rule):
    pattern = P("InstanceNormalization", Value("x"), Constant("scale"), Constant("bias"))

    def rewrite(self, match: Match, draft: Draft) -> None:
        x, kind = match.value("x"), match.graph.types[match.value("x")]
        rank = len(kind.shape)
        over = {"axes": tuple(range(2, rank)), "keepdims": 1}
        channel = (-1, *(1,) * (rank - 2))
        scale, bias = (draft.constant(name, match.constant(name).reshape(channel)) for name in ("scale", "bias"))
        epsilon = draft.constant("epsilon", np.full(1, match.root.attrs.get("epsilon", 1e-5), kind.dtype))

        mean = draft.node("ReduceMean", [x], over)
        d = draft.node("Sub", [x, mean])
        variance = draft.node("ReduceMean", [draft.node("Mul", [d, d])], over)
        deviation = draft.node("Sqrt", [draft.node("Add", [variance, epsilon])])
        factor = draft.node("Div", [scale, deviation])
        draft.finish("Add", [draft.node("Mul", [d, factor]), bias])
