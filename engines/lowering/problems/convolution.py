"""Convolutions with constant weights: grouped ones, of which a matrix product is the 1x1 case, and depthwise ones.

    Contraction   y[n, i, j, o] = program(sum over p, q, c of x[n, i_p, j_q, c] * w[o, c, p, q])
    Depthwise     y[n, i, j, c] = program(sum over p, q of x[n, i_p, j_q, c] * w[c, p, q])

    i_p = i * stride + p * dilation, and likewise j_q: the row and column of x that tap (p, q) reads

Volumes have planes before rows: [planes, rows, columns, channels], taps (r, p, q).

x and y are NHWC. The address of x is that of tap (0, 0) of output pixel (0, 0), and x has a halo of zero points, so
that taps need no bounds tests. The matrix product x[M, K] w[N, K]' is the 1x1 convolution of one row of M pixels.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.ir.rounding import HEAD, STEPS, from_bytes
from infer_server.engines.lowering.epilogue.functions import fma
from infer_server.engines.lowering.epilogue.program import load_meaning, store_meaning
from infer_server.engines.lowering.problems.problem import STORED, Array, ImageProblem
from infer_server.engines.lowering.problems.rows import ScaledRows
from infer_server.engines.lowering.problems.view import Halo, View


@dataclass(frozen=True)
class Convolution(ImageProblem):
    """Base of convolutions. Views of an item are [rows, columns, channels], or with planes first.

    x includes everything that the taps reach.

    Constants: "weights" [channels of y, channels of x per group, *taps], int8 or float; "program", a sequence of
    float32 [1] or [channels].
    """
    precision: str                  # int8, fp32, bf16 or fp16: the stored form of x
    taps: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    dilation: tuple[int, ...] = (1, 1)

    @property
    def unsupported_dtype(self) -> str:
        return super().unsupported_dtype or ("" if self.x.dtype == STORED[self.precision] else self.x.dtype)

    def read_by_tap(self, x: Array, *tap: int) -> Array:
        """Return the pixels of x [batch, rows, columns, ...] that a tap reads for all output pixels."""
        return x[(slice(None), *(slice(t * d, t * d + (count - 1) * s + 1, s) for t, d, s, count in zip(
            tap, self.dilation, self.stride, self.y.shape, strict=False)))]


@dataclass(frozen=True)
class Contraction(Convolution):
    """Grouped convolution: a channel of y sums over all channels of its group of x."""
    groups: int = 1
    border: Halo = Halo()           # rows and columns at the edges of x that are always zero (images only)
    bounded: bool = False           # INT8: sums of x * w stay within +-2**25 for all x
    weights: str = ""               # float: "int8" if they are stored as int8 with a scale per cout, else ""
    family = "contraction"

    @property
    def scaled(self) -> ScaledRows | None:
        """Problem that reads y and is solved with this one, or None."""
        return None

    @property
    def rows(self) -> int:
        return self.y.shape[-3]

    @property
    def cols(self) -> int:
        return self.y.shape[-2]

    @property
    def cout(self) -> int:
        """Output channels per group."""
        return self.y.shape[-1] // self.groups

    @property
    def cin(self) -> int:
        """Input channels per group."""
        return self.x.shape[-1] // self.groups

    @property
    def macs(self) -> int:
        return math.prod(self.y.shape) * self.cin * math.prod(self.taps)

    def real_weights(self, constants: Mapping[str, Any]) -> Array:
        """Return the weights with the values that are multiplied."""
        return np.asarray(constants["weights"])

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        return (self.finished(self.sums(x, constants).astype(np.float32), operands, constants),)

    def sums(self, x: Array, constants: Mapping[str, Any]) -> Array:
        """Return the sums [batch, *y.shape]; exact for bytes."""
        # Sums of bytes are exact in float64, and NumPy multiplies matrices of floats many times as fast as integers.
        wide: np.dtype[Any] = np.dtype(np.float64 if self.precision == "int8" else np.float32)
        weights = self.real_weights(constants)
        if self.precision != "int8":
            weights = load_meaning(self.x.dtype, store_meaning(self.x.dtype, weights.astype(np.float32)))
        weights = weights.astype(wide).reshape(self.groups, self.cout, self.cin, *self.taps)
        x = load_meaning(self.x.dtype, x).astype(wide).reshape(*x.shape[:-1], self.groups, self.cin)
        sums = np.zeros((self.groups, len(x), *self.y.shape[:-1], self.cout), wide)
        for tap in np.ndindex(*self.taps):
            pixels = self.read_by_tap(x, *tap)
            for g in range(self.groups):
                sums[g] += np.tensordot(pixels[..., g, :], weights[(g, ..., *tap)], (-1, -1))
        return np.moveaxis(sums, 0, -2).reshape(len(x), *self.y.shape)


@dataclass(frozen=True)
class ScaledContraction(Contraction):
    """Matrix product whose result y, float32, is also written as ScaledRows: `numbers` and `scales`."""
    numbers: View | None = None
    scales: View | None = None
    steps: int = STEPS
    writes_y: bool = True           # False: y is no output; kernels keep a block of its rows in scratch memory
    family = "scaled_contraction"
    writes = ("y", "numbers", "scales")

    @property
    def outputs(self) -> tuple[View, ...]:
        return super().outputs if self.writes_y else self._views(self.writes[1:])

    @property
    def scaled(self) -> ScaledRows:
        assert self.numbers is not None
        return ScaledRows((self.y,), self.numbers, scales=self.scales, steps=self.steps)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        y, = super().reference(inputs, constants)
        return *([y] if self.writes_y else []), *self.scaled.reference([y], {})


@dataclass(frozen=True)
class BlockedProduct(Contraction):
    """Matrix product with 4-bit weights: w[o, k] = scale[o, k // block] * q[o, k] + offset[o, k // block].

    Constants: "weights", q as uint8 [channels of y, channels of x] in 0..15; "scales" and "offsets", float32.
    """
    block: int = 0
    centred: bool = False           # every offset is -8 times the scale
    family = "blocked_product"

    def real_weights(self, constants: Mapping[str, Any]) -> Array:
        q, scales, offsets = (np.asarray(constants[name]) for name in ("weights", "scales", "offsets"))
        scales, offsets = (np.repeat(array, self.block, 1)[:, :q.shape[1]] for array in (scales, offsets))
        return np.asarray(fma(q.astype(np.float32), scales, offsets))


@dataclass(frozen=True)
class RoundedProduct(BlockedProduct):
    """Blocked product whose x is quantised in the same blocks, as bytes laid out by engines/ops/blocks.py.

    Sums within a block are exact in integers.
    """
    family = "rounded_product"

    @property
    def unsupported_dtype(self) -> str:
        others = (view.dtype for view in (*self.operands, self.y) if view.dtype not in self.computes_on)
        return next(others, "" if self.x.dtype == "int8" else self.x.dtype)

    @property
    def cin(self) -> int:
        """Input channels, padded to whole blocks."""
        return self.x.shape[-1] // (HEAD + self.block) * self.block

    def sums(self, x: Array, constants: Mapping[str, Any]) -> Array:
        weights = self.real_weights(constants)
        return np.asarray(np.tensordot(from_bytes(x, self.block)[..., :weights.shape[1]], weights, (-1, -1)))


@dataclass(frozen=True)
class Depthwise(Convolution):
    """Depthwise convolution: a channel of y depends on the same channel of x.

    Floats are computed in float32. Nothing past the last tap is read.
    """
    family = "depthwise"

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
        for q in range(self.taps[1]):       # column-major, the kernel's order of float additions
            for p in range(self.taps[0]):
                tap, w = self.read_by_tap(wide, p, q), weights[:, p, q]
                acc = acc + tap * w.astype(np.int64) if integers else fma(tap, w.astype(np.float32), acc)
        return (self.finished(acc.astype(np.float32), operands, constants),)
