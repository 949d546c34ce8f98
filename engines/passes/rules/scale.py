"""Fold a Mul or Add with constants into the linear layer before it, or a Mul into the layer after it.

    Conv(x, W, b) * k = Conv(x, k W, k b)        Conv(x, W, b) + c = Conv(x, W, b + c)
    Conv(x * k, W, b) = Conv(x, W k, b)          for a scalar k (padding stays zero), or a depthwise Conv
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.graph import Array
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.passes.rewriting.facts import per_channel
from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, No, P, Rule, Value
from infer_server.engines.passes.rules.linear import LINEAR, finish_scaled, output_channels, weights_are_constant


class LinearScale(Rule):
    pattern = P("Mul Add", P(LINEAR, bind="linear"), Constant("constant"))

    def check(self, match: Match) -> bool | No:
        linear = match["linear"]
        weights = weights_are_constant(match.graph, linear)
        if not weights:
            return weights
        if match.type.shape != match.shape(linear.outputs[0]):
            return No("the constant has more elements than the layer's output")
        if self._channels(match) is None:
            return No(f"the constant {list(match.constant('constant').shape)} varies within a channel")
        return True

    def rewrite(self, match: Match, draft: Draft) -> None:
        constant = self._channels(match)
        assert constant is not None
        if match.root.op == "Mul":
            finish_scaled(match, draft, match["linear"], constant, np.zeros_like(constant))
        else:
            finish_scaled(match, draft, match["linear"], None, constant)

    @staticmethod
    def _channels(match: Match) -> Array | None:
        linear = match["linear"]
        rank = len(match.shape(linear.outputs[0]))
        constant = match.constant("constant").astype(np.float64)
        return per_channel(constant, rank, output_channels(match.graph, linear))


class ScaleLinear(Rule):
    pattern = P(LINEAR, P("Mul", Value("x"), Constant("factor")), Constant("weight"), bind="linear")

    def check(self, match: Match) -> bool | No:
        if match.constant("factor").size != 1 or match.shape(match.value("x")) != match.shape(match.root.inputs[0]):
            return False
        return weights_are_constant(match.graph, match["linear"])

    def rewrite(self, match: Match, draft: Draft) -> None:
        weight = match.constant("weight")
        scaled = weight.astype(np.float64) * match.constant("factor").reshape(())
        draft.finish(match.root.op, [match.value("x"), draft.constant("weight", scaled.astype(weight.dtype)),
                                     *match.root.inputs[2:]], match.root.attrs)


class ScaleDepthwise(Rule):
    pattern = P("Conv", P("Mul", Value("x"), Constant("factor")), Constant("weight"), bind="linear")

    def check(self, match: Match) -> bool | No:
        channels = match.shape(match.root.inputs[0])[1]
        if match.root.attrs.get("group", 1) != channels or match.shape(match.value("x")) != match.shape(
                match.root.inputs[0]) or self._factors(match) is None:
            return False
        return weights_are_constant(match.graph, match["linear"])

    def rewrite(self, match: Match, draft: Draft) -> None:
        weight, factors = match.constant("weight"), self._factors(match)
        assert factors is not None
        each = np.repeat(factors, len(weight) // len(factors)).reshape(-1, *(1,) * (weight.ndim - 1))
        scaled = (weight.astype(np.float64) * each).astype(weight.dtype)
        draft.finish("Conv", [match.value("x"), draft.constant("weight", scaled), *match.root.inputs[2:]],
                     match.root.attrs)

    @staticmethod
    def _factors(match: Match) -> Array | None:
        """Return the factor of each channel, float64, or None if they vary within a channel."""
        shape = match.shape(match.root.inputs[0])
        return per_channel(match.constant("factor").astype(np.float64), len(shape), as_int(shape[1]))
