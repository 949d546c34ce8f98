"""Activations: functions of one element that follow a layer. x is the input, y the output; formulas as in ONNX."""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from engines.ir.graph import Array
from engines.ops.arithmetic import erf
from engines.ops.pointwise import Epilogue, Pointwise


class Relu(Epilogue):
    @staticmethod
    def formula(x: Array) -> Array:
        return np.maximum(x, 0)


class LeakyRelu(Epilogue):
    @staticmethod
    def formula(x: Array, alpha: float = 0.01) -> Array:
        return np.where(x < 0, alpha * x, x)


class PRelu(Epilogue):
    """LeakyRelu with a slope that broadcasts to x."""

    @staticmethod
    def formula(x: Array, slope: Array) -> Array:
        return np.where(x < 0, slope * x, x)


class ThresholdedRelu(Pointwise):
    @staticmethod
    def formula(x: Array, alpha: float = 1.0) -> Array:
        return np.where(x > alpha, x, 0)


class Clip(Epilogue):
    """min(max(x, min), max); a bound is a number, or an array that broadcasts (per channel, after siblings merged)."""

    @staticmethod
    def formula(x: Array, min: Any = -math.inf, max: Any = math.inf) -> Array:
        low, high = (_bound(value, x.dtype) for value in (min, max))
        return np.minimum(np.maximum(x, low), high)


def _bound(value: Any, dtype: np.dtype[Any]) -> Array:
    """An open bound (infinity) of an integer tensor is the end of its range."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        value = np.clip(value, info.min, info.max)
        return np.where(value >= info.max, info.max, value.astype(dtype)).astype(dtype)
    return np.asarray(value, dtype)


class Elu(Epilogue):
    @staticmethod
    def formula(x: Array, alpha: float = 1.0) -> Array:
        return np.where(x < 0, alpha * np.expm1(x), x)


class Celu(Epilogue):
    @staticmethod
    def formula(x: Array, alpha: float = 1.0) -> Array:
        return np.where(x < 0, alpha * np.expm1(x / alpha), x)


class Selu(Epilogue):
    @staticmethod
    def formula(x: Array, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Array:
        return gamma * np.where(x <= 0, alpha * np.expm1(x), x)


class Sigmoid(Epilogue):
    """1 / (1 + exp(-x))"""

    @staticmethod
    def formula(x: Array) -> Array:
        return sigmoid(x)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class HardSigmoid(Epilogue):
    @staticmethod
    def formula(x: Array, alpha: float = 0.2, beta: float = 0.5) -> Array:
        return np.clip(alpha * x + beta, 0, 1)


class HardSwish(Epilogue):
    """x * max(0, min(1, x / 6 + 1/2))"""

    @staticmethod
    def formula(x: Array) -> Array:
        return x * np.clip(x / 6 + 0.5, 0, 1)


class Swish(Epilogue):
    """x * sigmoid(x), also called SiLU; ONNX's alpha is arithmetic before it is this."""

    @staticmethod
    def formula(x: Array) -> Array:
        return x * sigmoid(x)


class Tanh(Epilogue):
    @staticmethod
    def formula(x: Array) -> Array:
        return np.tanh(x)


class Softplus(Epilogue):
    """log(1 + exp(x))"""

    @staticmethod
    def formula(x: Array) -> Array:
        return np.asarray(np.logaddexp(x, x.dtype.type(0)))


class Softsign(Pointwise):
    @staticmethod
    def formula(x: Array) -> Array:
        return np.asarray(x / (1 + np.abs(x)))


class Mish(Epilogue):
    """x * tanh(softplus(x))"""

    @staticmethod
    def formula(x: Array) -> Array:
        return np.asarray(x * np.tanh(np.logaddexp(x, x.dtype.type(0))))


class Gelu(Epilogue):
    """x * P(standard normal < x), exact or by the tanh approximation."""

    @staticmethod
    def formula(x: Array, approximate: str = "none") -> Array:
        if approximate == "tanh":
            return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))))
        return np.asarray(0.5 * x * (1 + erf(x * math.sqrt(0.5))))


class Shrink(Pointwise):
    @staticmethod
    def formula(x: Array, bias: float = 0.0, lambd: float = 0.5) -> Array:
        return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0))
