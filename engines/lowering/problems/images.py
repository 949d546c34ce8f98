"""Problems on images [height, width, channels]: pools and resizing.

    Pool          y[n, i, j, c] = program(max or mean over p, q of
                      x[n, i * stride + p * dilation - pad, j * stride + q * dilation - pad, c])
    GlobalPool    y[n, c] = program(max or sum over all i, j, ... of x[n, i, j, ..., c])
    Resize        y[n, i, j, c] = program(sum over p of u[i, p] * (sum over q of
                      v[j, q] * x[n, rows[i, p], columns[j, q], c]))

The average of a Pool is sum * float32(1 / count); the count and what a padded tap adds (`pad_value`, the stored zero)
follow ONNX's count_include_pad: taps beyond the pads never count. A GlobalPool is also a ReduceMean, ReduceSum or
ReduceMax over the axes between batch and channels; a mean's 1 / count is a constant of its program. Sums of u8 are
exact in int32: up to 2**23 elements. A Resize is by nearest, linear, cubic or any weights that are separable: a nearest
neighbour is one tap of weight 1 on each axis. Which taps, and their weights, are tables, which hold all that coordinate
modes are about.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any

import numpy as np

from infer_server.engines.lowering.epilogue.functions import fma
from infer_server.engines.lowering.epilogue.program import load_meaning
from infer_server.engines.lowering.problems.problem import Array, ImageProblem
from infer_server.engines.lowering.problems.view import View, joined

FEW, MANY = 1 << 7, 1 << 12         # pixels of a GlobalPool: one run up to FEW, ...
RUN, LONG_RUN = 1 << 5, 1 << 9      # ... short runs up to MANY, about as many as pixels in each


@dataclass(frozen=True)
class Axis:
    """Spatial axis of a window, and its clipping at the image's border."""
    extent: int             # extent of x
    outputs: int            # extent of y
    kernel: int
    stride: int
    dilation: int
    begin: int              # pads
    end: int

    def taps(self, i: int) -> tuple[int, int, int]:
        """Return [first, last) of output i's taps within the image, and the number within the padded image."""
        pixels = [i * self.stride - self.begin + p * self.dilation for p in range(self.kernel)]
        inside = [p for p, pixel in enumerate(pixels) if 0 <= pixel < self.extent]
        counted = sum(pixel < self.extent + self.end for pixel in pixels)
        return (inside[0], inside[-1] + 1, counted) if inside else (0, 0, counted)

    @property
    def groups(self) -> list[tuple[int, int, tuple[int, int, int]]]:
        """Runs of outputs with equal taps as (first output, count, taps); unclipped outputs form one run."""
        first, behind, whole = 0, self.outputs, (0, self.kernel, self.kernel)
        while first < behind and self.taps(first) != whole:
            first += 1
        while first < behind and self.taps(behind - 1) != whole:
            behind -= 1
        edges = ([(i, self.taps(i)) for i in range(first)],
                 [(behind + i, self.taps(behind + i)) for i in range(self.outputs - behind)])
        before, after = ([(outputs[0][0], len(outputs), taps) for taps, members in groupby(edge, lambda one: one[1])
                          for outputs in [list(members)]] for edge in edges)
        return [*before, *([(first, behind - first, whole)] if first < behind else []), *after]

    @property
    def whole(self) -> tuple[int, int]:
        """Range [first, last) of the outputs whose windows are not clipped."""
        return next(((first, first + count) for first, count, taps in self.groups
                     if taps == (0, self.kernel, self.kernel)), (0, 0))


@dataclass(frozen=True)
class Pool(ImageProblem):
    """Window pooling, of kind "max" or "average". Views are [height, width, channels], or with depth first."""
    kind: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)        # before each axis, then after: top, left, bottom, right
    dilation: tuple[int, ...] = (1, 1)
    count_include_pad: bool = False
    pad_value: int = 0
    family = "pool"

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Spatial axes: rows and columns; planes first for volumes."""
        rank = len(self.kernel)
        return tuple(Axis(self.x.shape[a], self.y.shape[a], self.kernel[a], self.stride[a], self.dilation[a],
                          self.pads[a], self.pads[a + rank]) for a in range(rank))

    @property
    def summed(self) -> tuple[int, ...]:
        """Order of the axes in which floats are summed: rows, planes, columns."""
        return (0, 1) if len(self.kernel) == 2 else (1, 0, 2)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        return (self.finished(self._accumulator(x), operands, constants),)

    def _accumulator(self, x: Array) -> Array:
        wide: Any = x.astype(np.int64) if x.dtype == np.uint8 else load_meaning(self.x.dtype, x)
        lowest = -np.inf if wide.dtype == np.float32 else 0
        spare = [(a.outputs - 1) * a.stride + (a.kernel - 1) * a.dilation + 1 - a.begin - a.extent for a in self.axes]
        padding = [(a.begin, max(more, 0)) for a, more in zip(self.axes, spare, strict=True)]
        wide = np.pad(wide, [(0, 0), *padding, (0, 0)], constant_values=lowest if self.kind == "max" else 0)
        combine: Any = np.maximum if self.kind == "max" else np.add
        for axis in self.summed:
            extent = self.axes[axis]
            taps = [np.take(wide, np.arange(extent.outputs) * extent.stride + p * extent.dilation, axis + 1)
                    for p in range(extent.kernel)]
            wide = taps[0]
            for tap in taps[1:]:
                wide = combine(wide, tap)
        if self.kind == "max":
            return np.asarray(wide, np.float32)
        taps = [np.array([axis.taps(i) for i in range(axis.outputs)]) for axis in self.axes]
        inside = reduce(np.multiply.outer, (t[:, 1] - t[:, 0] for t in taps))
        count = reduce(np.multiply.outer, (t[:, 2] for t in taps)) if self.count_include_pad else inside
        wide = (wide + ((count - inside) * self.pad_value).astype(wide.dtype)[..., None]).astype(np.float32)
        return np.asarray(wide * (np.float32(1) / count.astype(np.float32))[..., None], np.float32)


@dataclass(frozen=True)
class GlobalPool(ImageProblem):
    """Global pooling, of kind "max" or "sum".

    x is [..., channels]; y and the operands have any shape with as many elements, channels last.
    """
    kind: str
    family = "global_pool"

    @property
    def channels(self) -> int:
        return self.x.shape[-1]

    @property
    def joined_view(self) -> View:
        """View of x with as few axes as possible."""
        return joined((self.x,), keep_last=True)[0]

    @property
    def run(self) -> int:
        """Number of pixels per partial sum, which bounds rounding errors; 0: a single sum."""
        pixels = math.prod(self.joined_view.shape[:-1])
        if self.kind != "sum" or self.x.dtype == "uint8" or pixels <= FEW:
            return 0
        return RUN if pixels <= MANY else LONG_RUN

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        pixels = x.reshape(len(x), -1, self.channels)
        wide: Any = pixels.astype(np.int64) if x.dtype == np.uint8 else load_meaning(self.x.dtype, pixels)
        if run := self.run:
            rows = wide.reshape(len(x), -1, self.joined_view.shape[-2], self.channels)
            parts = [np.add.accumulate(rows[:, :, i:i + run], 2)[:, :, -1] for i in range(0, rows.shape[2], run)]
            wide = np.stack(parts, 2).reshape(len(x), -1, self.channels)
        # In order, as kernels add; np.sum adds pairwise.
        accumulator = wide.max(1) if self.kind == "max" else np.add.accumulate(wide, 1)[:, -1]
        return (self.finished(accumulator.astype(np.float32).reshape(len(x), *self.y.shape), operands, constants),)


@dataclass(frozen=True)
class Resize(ImageProblem):
    """taps: of rows, of columns."""
    taps: tuple[int, int] = (1, 1)
    family = "resize"

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Interpolate rows and columns, then apply the epilogue.

        constants: "rows" and "columns" are (index, weight), each [outputs, taps], from taps_of; "program" is a
        sequence of float32 [1] or [channels].
        """
        x, *operands = inputs
        (rows, u), (columns, v) = constants["rows"], constants["columns"]
        wide = load_meaning(self.x.dtype, x)
        lines = _weighted([(wide[:, :, columns[:, q]], v[:, q, None]) for q in range(self.taps[1])])
        total = _weighted([(lines[:, rows[:, p]], u[:, p, None, None]) for p in range(self.taps[0])])
        return (self.finished(total, operands, constants),)


def taps_of(matrix: Array) -> tuple[Array, Array]:
    """Weights [out, in] of one axis -> (index, weight) [out, taps]: those that are not 0, padded with weight 0."""
    taps = max(int((matrix != 0).sum(1).max()), 1)
    index = np.argsort(matrix == 0, axis=1, kind="stable")[:, :taps]
    return index, np.take_along_axis(matrix, index, 1).astype(np.float32)


def _weighted(terms: list[tuple[Array, Array]]) -> Array:
    """Return the sum of value * weight; a single term has weight 1."""
    total, weight = terms[0]
    if len(terms) == 1:
        return total
    total = total * np.asarray(weight, np.float32)
    for value, weight in terms[1:]:
        total = fma(value, np.asarray(weight, np.float32), total)
    return total
