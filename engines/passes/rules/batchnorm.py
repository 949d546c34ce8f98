"""Fold batch normalisation, a scale and a shift per channel, into neighbouring layers.

    BN(y) = y * k + c        k = gamma / sqrt(var + epsilon)        c = beta - mean * k

    BN(Conv(x, W, b)) = Conv(x, k W, k b + c)
    Conv(BN(x), W, b) = Conv(x, W k, b + W c)        without padding, or with c = 0
    BN(x) = x * k + c                                if neither applies
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.graph import Array
from infer_server.engines.passes.rewriting.facts import pads
from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, No, P, Rule, Value
from infer_server.engines.passes.rules.linear import LINEAR, bias_of, finish_scaled, weights_are_constant

_STATISTICS = (Constant("gamma"), Constant("beta"), Constant("mean"), Constant("var"))


def _scale_and_shift(match: Match) -> tuple[Array, Array]:
    """Return k and c, float64 [C]."""
    gamma, beta, mean, var = (match.constant(bind).astype(np.float64) for bind in ("gamma", "beta", "mean", "var"))
    k = gamma / np.sqrt(var + match["bn"].attrs.get("epsilon", 1e-5))
    return k, beta - mean * k


class LinearBatchNorm(Rule):
    pattern = P("BatchNormalization", P(LINEAR, bind="linear"), *_STATISTICS, bind="bn")

    def check(self, match: Match) -> bool | No:
        return weights_are_constant(match.graph, match["linear"])

    def rewrite(self, match: Match, draft: Draft) -> None:
        finish_scaled(match, draft, match["linear"], *_scale_and_shift(match))


class BatchNormConv(Rule):
    pattern = P("Conv", P("BatchNormalization", Value("x"), *_STATISTICS, bind="bn"), Constant("weight"), bind="conv")

    def check(self, match: Match) -> bool | No:
        conv = match["conv"]
        weights = weights_are_constant(match.graph, conv)
        if not weights:
            return weights
        _, shift = _scale_and_shift(match)
        if any(pads(conv, match.constant("weight").ndim - 2)) and np.any(shift):
            return No("the convolution pads with zeros, which the batch normalisation before it does not shift")
        return True

    def rewrite(self, match: Match, draft: Draft) -> None:
        conv, weight = match["conv"], match.constant("weight").astype(np.float64)
        k, c = _scale_and_shift(match)
        groups = conv.attrs.get("group", 1)
        blocks = weight.reshape(groups, -1, *weight.shape[1:])          # [groups, Cout / groups, Cin / groups, ...]
        per_input = (groups, 1, -1, *(1,) * (weight.ndim - 2))
        shifts = (blocks * c.reshape(per_input)).reshape(len(weight), -1).sum(axis=1)
        scaled = (blocks * k.reshape(per_input)).reshape(weight.shape)
        dtype = match.constant("weight").dtype
        names = (draft.constant("weight", scaled.astype(dtype)),
                 draft.constant("bias", (bias_of(match.graph, conv) + shifts).astype(dtype)))
        draft.finish("Conv", [match.value("x"), *names], conv.attrs)


class BatchNormToPointwise(Rule):
    pattern = P("BatchNormalization", Value("x"), *_STATISTICS, bind="bn")

    def rewrite(self, match: Match, draft: Draft) -> None:
        x = match.graph.types[match.value("x")]
        shape = (-1, *(1,) * (len(x.shape) - 2))
        k, c = (array.astype(x.dtype).reshape(shape) for array in _scale_and_shift(match))
        product = draft.node("Mul", [match.value("x"), draft.constant("scale", k)])
        draft.finish("Add", [product, draft.constant("shift", c)])
