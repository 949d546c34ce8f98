"""Activation functions, with formulas as in ONNX; x is the input, y the output.

Mish is x * tanh(softplus(x)), Softplus log(1 + exp(x)), Swish (SiLU) x * sigmoid(x); Swish with an alpha is decomposed
first. PRelu is LeakyRelu with a slope that broadcasts to x.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array
from infer_server.engines.ops.arithmetic import erf
from infer_server.engines.ops.pointwise import Epilogue, Pointwise, define


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


define(
    Epilogue,
    Relu=lambda x: np.maximum(x, 0),
    LeakyRelu=lambda x, alpha=0.01: np.where(x < 0, alpha * x, x),
    PRelu=lambda x, slope: np.where(x < 0, slope * x, x),
    Elu=lambda x, alpha=1.0: np.where(x < 0, alpha * np.expm1(x), x),
    Celu=lambda x, alpha=1.0: np.where(x < 0, alpha * np.expm1(x / alpha), x),
    Selu=lambda x, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875:
        gamma * np.where(x <= 0, alpha * np.expm1(x), x),
    Sigmoid=sigmoid,
    HardSigmoid=lambda x, alpha=0.2, beta=0.5: np.clip(alpha * x + beta, 0, 1),
    HardSwish=lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    Swish=lambda x: x * sigmoid(x),
    Tanh=np.tanh,
    Softplus=lambda x: np.logaddexp(x, x.dtype.type(0)),
    Mish=lambda x: x * np.tanh(np.logaddexp(x, x.dtype.type(0))),
)
define(
    Pointwise,
    Shrink=lambda x, bias=0.0, lambd=0.5: np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)),
    Softsign=lambda x: x / (1 + np.abs(x)),
    ThresholdedRelu=lambda x, alpha=1.0: np.where(x > alpha, x, 0),
)


class Clip(Epilogue):
    """Clamp min(max(x, min), max), with scalar bounds or arrays that broadcast (per channel, for merged siblings).

    saturates: the result becomes integers, so NaN becomes `min`.
    """

    @staticmethod
    def formula(x: Array, min: Any = -math.inf, max: Any = math.inf, saturates: int = 0) -> Array:
        low, high = (_bound(value, x.dtype) for value in (min, max))
        raised = (np.fmax if saturates else np.maximum)(x, low)
        return np.minimum(raised, high)


def _bound(value: Any, dtype: np.dtype[Any]) -> Array:
    """Return a bound in the dtype of x; infinite bounds of integers are the ends of the dtype's range."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        value = np.clip(value, info.min, info.max)
        return np.where(value >= info.max, info.max, value.astype(dtype)).astype(dtype)
    return np.asarray(value, dtype)


class Gelu(Epilogue):
    """Gaussian error linear unit x * P(standard normal < x), exact or by the tanh approximation."""

    @staticmethod
    def formula(x: Array, approximate: str = "none") -> Array:
        if approximate == "tanh":
            return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))))
        return np.asarray(0.5 * x * (1 + erf(x * math.sqrt(0.5))))
