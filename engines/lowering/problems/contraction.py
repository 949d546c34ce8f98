"""Convolution, and the matrix product by constant weights as its 1x1 case.

    y[n, i, j, o] = program(sum over p, q, c of
                            x[n, i * stride + p * dilation, j * stride + q * dilation, c] * w[o, c, p, q])

x and y are NHWC; x's address is that of tap (0, 0) of output pixel (0, 0), and around it lies a halo of zero points, so
that no tap needs a test. The matrix product x[M, K] w[N, K]' is the 1x1 convolution of one row of M pixels.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.lowering.epilogue.program import load_meaning, store_meaning
from engines.lowering.problems.problem import STORED, Array, ImageProblem
from engines.lowering.problems.view import Halo


@dataclass(frozen=True)
class Contraction(ImageProblem):
    """Views of one item are [rows, columns, channels]; x's includes all that the taps reach.

    Constants: "weights" [cout of all groups, cin, *taps], int8 or float; "program", a sequence of float32 [1] or
    [channels].
    """
    precision: str                  # int8, fp32, bf16, fp16
    taps: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    border: Halo = Halo()           # rows and columns of x, in from its edges, that hold nothing but zeros
    bounded: bool = False           # INT8: no x makes a sum of x * w leave +-2**25
    family = "contraction"

    @property
    def misfit(self) -> str:
        return super().misfit or ("" if self.x.dtype == STORED[self.precision] else self.x.dtype)

    @property
    def rows(self) -> int:
        return self.y.shape[0]

    @property
    def cols(self) -> int:
        return self.y.shape[1]

    @property
    def cout(self) -> int:
        """Of one group."""
        return self.y.shape[2] // self.groups

    @property
    def cin(self) -> int:
        """Of one group."""
        return self.x.shape[2] // self.groups

    @property
    def macs(self) -> int:
        return math.prod(self.y.shape) * self.cin * math.prod(self.taps)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        # Sums of bytes are exact in float64, and NumPy multiplies matrices of floats many times as fast as integers.
        wide: np.dtype[Any] = np.dtype(np.float64 if self.precision == "int8" else np.float32)
        weights = np.asarray(constants["weights"])
        if self.precision != "int8":
            weights = load_meaning(self.x.dtype, store_meaning(self.x.dtype, weights.astype(np.float32)))
        weights = weights.astype(wide).reshape(self.groups, self.cout, self.cin, *self.taps)
        x = load_meaning(self.x.dtype, x).astype(wide).reshape(*x.shape[:3], self.groups, self.cin)
        sums = np.zeros((self.groups, len(x), self.rows, self.cols, self.cout), wide)
        for p in range(self.taps[0]):
            for q in range(self.taps[1]):
                pixels = x[:, p * self.dilation[0]:, q * self.dilation[1]:]
                pixels = pixels[:, ::self.stride[0], ::self.stride[1]][:, :self.rows, :self.cols]
                for g in range(self.groups):
                    sums[g] += np.tensordot(pixels[..., g, :], weights[g, ..., p, q], (-1, -1))
        accumulator = np.moveaxis(sums, 0, -2).reshape(len(x), *self.y.shape).astype(np.float32)
        return (self.finished(accumulator, operands, constants),)
