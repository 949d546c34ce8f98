"""Depthwise convolution: every channel has its own k x k weights.

    y[n, i, j, c] = program(sum over p, q of x[n, i * stride + p * dilation, j * stride + q * dilation, c] * w[c, p, q])

x's address is that of tap (0, 0) of output pixel (0, 0), in a halo of zero points; nothing past the last tap is read.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.lowering.epilogue.functions import fma
from engines.lowering.epilogue.program import load_meaning
from engines.lowering.problems.problem import STORED, Array, ImageProblem


@dataclass(frozen=True)
class Depthwise(ImageProblem):
    """Views of one item are [rows, columns, channels], as many channels in y as in x.

    Constants: "weights" [channels, 1, *taps], int8 or float; "program", a sequence of float32 [1] or [channels].
    """
    precision: str                  # int8, fp32, bf16, fp16: how x is stored; floats are computed in float32
    taps: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    family = "depthwise"

    @property
    def misfit(self) -> str:
        return super().misfit or ("" if self.x.dtype == STORED[self.precision] else self.x.dtype)

    @property
    def channels(self) -> int:
        return self.y.shape[2]

    @property
    def macs(self) -> int:
        return math.prod(self.y.shape) * math.prod(self.taps)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        integers = self.precision == "int8"
        wide: Any = x.astype(np.int64) if integers else load_meaning(self.x.dtype, x)
        weights: Any = np.asarray(constants["weights"]).reshape(self.channels, *self.taps)
        acc: Any = np.zeros((len(x), *self.y.shape), np.int64 if integers else np.float32)
        for q in range(self.taps[1]):       # column by column: the order in which the kernel adds floats
            for p in range(self.taps[0]):
                tap = wide[:, p * self.dilation[0]:, q * self.dilation[1]:][:, ::self.stride[0], ::self.stride[1]]
                tap = tap[:, :self.y.shape[0], :self.y.shape[1]]
                w = weights[:, p, q]
                acc = acc + tap * w.astype(np.int64) if integers else fma(tap, w.astype(np.float32), acc)
        return (self.finished(acc.astype(np.float32), operands, constants),)
