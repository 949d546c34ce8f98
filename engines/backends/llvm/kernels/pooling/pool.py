"""MaxPool and AveragePool over [height, width, channels].

    y[n, i, j, c] = program(fold over p, q of x[n, i * stride + p * dilation - pad, j * stride + q * dilation - pad, c])

    for output row: for panel of channels:
      for columns whose windows are cut alike by the border:        one group inside, a few at each side
        for tile of columns:
          fold every x column of the tile over its tap rows         shared by the windows that overlap
          fold the columns of each window; program; store

Windows are clamped to the image, so x needs no halo. The average is sum * float32(1 / count); the count and what a
padded tap adds (`pad_value`, the stored zero) follow ONNX's count_include_pad: taps beyond the pads never count.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import FLOAT, I32, Function, Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.common.access import (
    item_addresses,
    load_channels,
    load_constants,
    offset,
    panels,
    run_program,
    store_channels,
)
from engines.backends.llvm.kernels.kernel import Grid, ImageKernel, Tactic, Window, begin_kernel, pack_channels
from engines.backends.llvm.kernels.pooling.reduction import Fold, Pixel
from engines.lowering.epilogue.program import load_meaning, store_meaning
from engines.lowering.problems.problem import Array

MOST_UNROLLED = 25      # taps; larger windows are loops over their rows


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a window, and how the image's border cuts it."""
    extent: int             # of x
    outputs: int            # of y
    kernel: int
    stride: int
    dilation: int
    begin: int              # pads
    end: int

    def taps(self, i: int) -> tuple[int, int, int]:
        """For output i: [first, last) of the taps inside the image, and how many lie inside the padded image."""
        places = [i * self.stride - self.begin + p * self.dilation for p in range(self.kernel)]
        inside = [p for p, place in enumerate(places) if 0 <= place < self.extent]
        counted = sum(place < self.extent + self.end for place in places)
        return (inside[0], inside[-1] + 1, counted) if inside else (0, 0, counted)

    @property
    def groups(self) -> list[tuple[int, int, tuple[int, int, int]]]:
        """Runs of outputs cut alike: (first output, how many, taps)."""
        found = []
        for taps, members in groupby(range(self.outputs), self.taps):
            outputs = list(members)
            found.append((outputs[0], len(outputs), taps))
        return found

    @property
    def whole(self) -> tuple[int, int]:
        """[first, last) of the outputs whose windows lie inside the image."""
        return next(((first, first + count) for first, count, taps in self.groups
                     if taps == (0, self.kernel, self.kernel)), (0, 0))


@dataclass(frozen=True)
class PoolTile(Tactic):
    """`cols` windows of `vectors` of channels at a time."""
    cols: int
    vectors: int

    def __str__(self) -> str:
        return f"tile 1x{self.cols}x{self.vectors}"


@dataclass(frozen=True)
class Pool(ImageKernel):
    """kind: "max" or "average". Views are [height, width, channels]."""
    kind: str
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)      # top, left, bottom, right
    dilation: tuple[int, int] = (1, 1)
    count_include_pad: bool = False
    pad_value: int = 0
    family = "pool"

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Rows, columns."""
        rows, cols = (Axis(self.x.shape[a], self.y.shape[a], self.kernel[a], self.stride[a], self.dilation[a],
                           self.pads[a], self.pads[a + 2]) for a in (0, 1))
        return rows, cols

    @property
    def packed(self) -> bool:
        return self.y.dtype == "uint8" and self.x.dtype == "uint8"

    @property
    def fold(self) -> str:
        return "max" if self.kind == "max" else "sum"

    def tactics(self, isa: Isa) -> Sequence[PoolTile]:
        found: dict[PoolTile, None] = {}
        for vectors in (4, 2, 1):
            vectors = min(vectors, isa.vectors_for(self.y.shape[2]))
            registers = Fold(self.fold, self.x.dtype, Lanes(isa, vectors * isa.lanes, self.packed)).registers
            free = (isa.registers - 4) // registers - (self.kernel[1] - 1) * self.dilation[1] - 1
            found[PoolTile(max(1, min(free // self.stride[1] + 1, 4, self.y.shape[1])), vectors)] = None
        return tuple(found)

    def grid(self, isa: Isa, tactic: PoolTile) -> Grid:
        return Grid(self.y.shape[0])

    def windows(self, isa: Isa, tactic: PoolTile) -> Sequence[Window]:
        read = (self.kernel[0] - 1) * self.dilation[0] + 1
        return [Window.along(self.x, step=self.stride[0], first=-self.pads[0], count=read),
                *(Window.along(view) for view in (*self.operands, self.y))]

    def packing(self, tactic: PoolTile) -> int:
        return tactic.vectors

    def emit(self, module: Module, name: str, isa: Isa, tactic: PoolTile) -> None:
        _Emitter(self, isa, tactic).kernel(module, name)

    def pack(self, isa: Isa, tactic: PoolTile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"program": a sequence of float32 [1] or [channels] -> [panel][constant][vector][lane]."""
        order = panels(isa, self.y.shape[2], self.packed, tactic.vectors * isa.lanes)
        return (pack_channels(constants["program"], self.y.shape[2], order),)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        others = [load_meaning(view.dtype, operand) for view, operand in zip(self.operands, operands, strict=True)]
        result = self.program.meaning(self._accumulator(x), others, constants["program"])
        return (store_meaning(self.y.dtype, result),)

    def _accumulator(self, x: Array) -> Array:
        rows, cols = self.axes
        wide: Any = x.astype(np.int64) if x.dtype == np.uint8 else load_meaning(self.x.dtype, x)
        lowest = -np.inf if wide.dtype == np.float32 else 0
        spare = [(a.outputs - 1) * a.stride + (a.kernel - 1) * a.dilation + 1 - a.begin - a.extent for a in self.axes]
        padding = [(a.begin, max(more, 0)) for a, more in zip(self.axes, spare, strict=True)]
        wide = np.pad(wide, [(0, 0), *padding, (0, 0)], constant_values=lowest if self.kind == "max" else 0)
        combine: Any = np.maximum if self.kind == "max" else np.add
        for axis, extent in enumerate((rows, cols), 1):
            taps = [np.take(wide, np.arange(extent.outputs) * extent.stride + p * extent.dilation, axis)
                    for p in range(extent.kernel)]
            wide = taps[0]
            for tap in taps[1:]:
                wide = combine(wide, tap)
        if self.kind == "max":
            return np.asarray(wide, np.float32)
        taps = [np.array([axis.taps(i) for i in range(axis.outputs)]) for axis in self.axes]
        inside = np.multiply.outer(*(t[:, 1] - t[:, 0] for t in taps))
        count = np.multiply.outer(*(t[:, 2] for t in taps)) if self.count_include_pad else inside
        wide = (wide + ((count - inside) * self.pad_value).astype(wide.dtype)[..., None]).astype(np.float32)
        return np.asarray(wide * (np.float32(1) / count.astype(np.float32))[..., None], np.float32)


@dataclass(frozen=True)
class _Rows:
    """Axis.taps of an output row, when it runs. unrolled: it is known now that they are all of the kernel's."""
    first: Value
    last: Value
    counted: Value
    unrolled: bool


class _Emitter:
    def __init__(self, spec: Pool, isa: Isa, tile: PoolTile) -> None:
        self.spec, self.isa, self.tile = spec, isa, tile
        self.rows, self.cols = spec.axes

    def kernel(self, module: Module, name: str) -> None:
        spec = self.spec
        f, addresses, (begin, end, *_) = begin_kernel(module, name, 1 + len(spec.operands) + 2)
        *inputs, self.constants, y = addresses
        views = (*spec.inputs, spec.y)
        for row in f.range("row", begin, end):
            i = row.remainder(self.rows.outputs)
            x, *others = item_addresses([*inputs, y], views, row.divided(self.rows.outputs))
            x = x + i * (self.rows.stride * spec.x.strides[0])
            # of the window's corner, which may lie outside of the image
            x = x + -(self.rows.begin * spec.x.strides[0] + self.cols.begin * spec.x.strides[1])
            others = [offset(a, [i], [view.strides[0]]) for a, view in zip(others, views[1:], strict=True)]
            first, last = self.rows.whole
            if spec.kernel[0] * spec.kernel[1] > MOST_UNROLLED or first == last:
                self._row(f, x, others, self._clamped(i))
                continue
            whole, all_of_them = (i - first).below(last - first), i.like(self.rows.kernel)
            with f.when(whole):
                self._row(f, x, others, _Rows(i.like(0), all_of_them, all_of_them, unrolled=True))
            if last - first < self.rows.outputs:
                with f.when(whole.binary("xor", 1)):
                    self._row(f, x, others, self._clamped(i))

    def _clamped(self, i: Value) -> _Rows:
        """Of output row i. Unsigned: all is counted from the padded image's edge."""
        axis, start = self.rows, i * self.rows.stride

        def reach(limit: int) -> Value:
            """Taps before this place of the padded image."""
            left = start.like(limit) - start.at_most(limit)
            return (left + (axis.dilation - 1)).divided(axis.dilation).at_most(axis.kernel)

        inside = axis.begin + axis.extent
        return _Rows(reach(axis.begin), reach(inside), reach(inside + axis.end), unrolled=False)

    def _row(self, f: Function, x: Value, others: list[Value], rows: _Rows) -> None:
        """One row of outputs."""
        spec = self.spec
        for start, channels in f.tiles("panel", spec.y.shape[2], self.tile.vectors * self.isa.lanes):
            lanes = Lanes(self.isa, channels, spec.packed)
            constants = load_constants(lanes, self.constants + start * (4 * spec.program.constants),
                                       spec.program.constants)
            here = [offset(a, [start], [v.strides[2]]) for a, v in zip(others, (*spec.operands, spec.y), strict=True)]
            for first, count, taps in self.cols.groups:
                scale, addend = self._average(f, rows, taps)
                for j, cols in f.tiles("column", count, self.tile.cols):
                    corner = x + start * spec.x.size + (j + first) * (self.cols.stride * spec.x.strides[1])
                    self._tile(f, lanes, rows, taps, cols, corner, scale, addend, constants,
                               [offset(a, [j + first], [v.strides[1]])
                                for a, v in zip(here, (*spec.operands, spec.y), strict=True)])

    def _average(self, f: Function, rows: _Rows, taps: tuple[int, int, int]) -> tuple[Value | None, Value | None]:
        """(1 / count, what padded taps add to a sum) for windows of these rows and columns, in all lanes."""
        spec = self.spec
        if spec.kind == "max":
            return None, None
        begin, end, counted = taps
        inside = (rows.last - rows.first) * (end - begin)
        count = rows.counted * counted if spec.count_include_pad else inside
        scale = f.splat(1 / f.cast("uitofp", count, FLOAT, "count"), self.isa.lanes)
        if not (spec.count_include_pad and spec.pad_value):
            return scale, None
        return scale, f.splat(f.cast("trunc", (count - inside) * spec.pad_value, I32, "padded"), self.isa.lanes)

    def _tile(self, f: Function, lanes: Lanes, rows: _Rows, taps: tuple[int, int, int], cols: int, corner: Value,
              scale: Value | None, addend: Value | None, constants: list[list[Value]], others: list[Value]) -> None:
        """`cols` neighbouring windows; corner: tap (0, 0) of the first."""
        spec, fold = self.spec, Fold(self.spec.fold, self.spec.x.dtype, lanes)
        windows = [[t * self.cols.stride + q * self.cols.dilation for q in range(*taps[:2])] for t in range(cols)]
        folded = self._fold_rows(f, fold, rows, sorted({column for window in windows for column in window}), corner)
        pixels = []
        for t, window in enumerate(windows):
            pixel = folded[window[0]] if window else fold.neutral(corner)
            for column in window[1:]:
                pixel = fold.combine(pixel, folded[column])
            pixels.append(self._finish(fold, pixel, scale, addend, constants, others, t))
        *_, y = others
        targets = [y + t * spec.y.strides[1] for t in range(cols)]
        if fold.bytes and spec.y.dtype == "uint8" and not spec.program.instructions:
            for pixel, target in zip(pixels, targets, strict=True):
                f.store(pixel[0], target)
        else:
            store_channels(lanes, spec.y, pixels, targets)

    def _fold_rows(self, f: Function, fold: Fold, rows: _Rows, columns: list[int], corner: Value) -> dict[int, Pixel]:
        """Each column of x over its tap rows."""
        x, step = self.spec.x, self.rows.dilation * self.spec.x.strides[0]
        if rows.unrolled:
            folded = {column: fold.load(corner + column * x.strides[1]) for column in columns}
            for p in range(1, self.rows.kernel):
                for column in columns:
                    tap = fold.load(corner + (column * x.strides[1] + p * step))
                    folded[column] = fold.combine(folded[column], tap)
            return folded
        acc = {(column, n): value for column in columns for n, value in enumerate(fold.neutral(corner))}
        for row in f.range("tap row", rows.first, rows.last, acc=acc):
            for column in columns:
                so_far = [acc[column, n] for n in range(fold.registers)]
                tap = fold.load(corner + row * step + column * x.strides[1])
                acc.update({(column, n): value for n, value in enumerate(fold.combine(so_far, tap))})
        return {column: [acc[column, n] for n in range(fold.registers)] for column in columns}

    def _finish(self, fold: Fold, pixel: Pixel, scale: Value | None, addend: Value | None,
                constants: list[list[Value]], others: list[Value], t: int) -> Pixel:
        """The program on one folded window; bytes stay bytes where there is none."""
        spec = self.spec
        if fold.bytes and spec.y.dtype == "uint8" and not spec.program.instructions:
            return pixel
        if addend is not None:
            added = addend if fold.ints else fold.lanes.isa.to_float(addend)
            pixel = [value + added for value in pixel]
        values = fold.finish(pixel)
        if scale is not None:
            values = [value * scale for value in values]
        operands = [load_channels(fold.lanes, view, a + t * view.strides[1])
                    for view, a in zip(spec.operands, others, strict=False)]
        return run_program(fold.lanes, spec.program, values, operands, constants)
