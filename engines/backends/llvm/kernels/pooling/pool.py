"""MaxPool and AveragePool over [height, width, channels] or [depth, height, width, channels].

    for output row, of any plane: for panel of channels:
      for columns whose windows the border clips equally:           one group inside, a few at each side
        for tile of columns:
          reduce every x column of the tile over its tap rows,      shared by the windows that overlap
            in all tap planes of a volume
          reduce the columns of each window; program; store

Windows are clamped to the image, so x needs no halo.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import item_addresses, offset
from infer_server.engines.backends.llvm.kernels.common.pixels import (
    finish_pixel,
    load_constants,
    pack_panels,
    store_channels,
)
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from infer_server.engines.backends.llvm.kernels.pooling.reduction import Pixel, PixelReduction
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import FLOAT, I32
from infer_server.engines.lowering.problems.images import Axis, Pool
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import View

MOST_UNROLLED = 25      # most taps that are unrolled; larger windows are loops over their rows


@dataclass(frozen=True)
class PoolTile(Tactic):
    """Tactic of pooling: `cols` windows of `vectors` of channels at a time."""
    cols: int
    vectors: int

    def __str__(self) -> str:
        return f"tile 1x{self.cols}x{self.vectors}"


@solves(Pool)
class PoolKernel(Kernel[Pool]):
    """Kernel of max and average pooling."""
    @property
    def packed(self) -> bool:
        return self.problem.x.dtype == self.problem.y.dtype == "uint8"

    def reduction(self, lanes: Lanes) -> PixelReduction:
        return PixelReduction("max" if self.problem.kind == "max" else "sum", self.problem.x.dtype, lanes)

    def tactics(self, isa: Isa) -> Sequence[PoolTile]:
        found: dict[PoolTile, None] = {}
        cols = self.problem.axes[-1]
        for vectors in (4, 2, 1):
            vectors = min(vectors, isa.vectors_for(self.problem.y.shape[-1]))
            registers = self.reduction(Lanes(isa, vectors * isa.lanes, self.packed)).registers
            free = (isa.registers - 4) // registers - (cols.kernel - 1) * cols.dilation - 1
            found[PoolTile(max(1, min(free // cols.stride + 1, 4, cols.outputs)), vectors)] = None
        return tuple(found)

    def grid(self, isa: Isa, tactic: PoolTile) -> Grid:
        return Grid(math.prod(self.problem.y.shape[:-2]))

    def windows(self, isa: Isa, tactic: PoolTile) -> Sequence[Window]:
        problem = self.problem
        read = (problem.kernel[0] - 1) * problem.dilation[0] + 1
        rows = math.prod(problem.y.shape[1:-2])     # grid rows in one index of the first axis
        return [Window.along(problem.x, 0, rows, problem.stride[0], first=-problem.pads[0], count=read),
                *(Window.along(view, 0, rows) for view in (*problem.operands, problem.y))]

    def packing(self, tactic: PoolTile) -> int:
        return tactic.vectors

    def emit(self, module: Module, name: str, isa: Isa, tactic: PoolTile) -> None:
        _PoolEmitter(self, isa, tactic).emit(module, name)

    def pack(self, isa: Isa, tactic: PoolTile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return (pack_panels(isa, constants, self.problem.y.shape[-1], self.packed, tactic.vectors * isa.lanes),)


@dataclass(frozen=True)
class _Taps:
    """Taps of an output row or plane (Axis.taps) as run-time numbers.

    unrolled: they are all taps of the kernel, which is known at build time.
    """
    first: Value
    last: Value
    counted: Value
    unrolled: bool


class _PoolEmitter:
    """Emitter of a pooling kernel."""
    def __init__(self, kernel: PoolKernel, isa: Isa, tile: PoolTile) -> None:
        self.kernel, self.problem, self.isa, self.tile = kernel, kernel.problem, isa, tile
        *self.planes, self.rows, self.cols = self.problem.axes

    def emit(self, module: Module, name: str) -> None:
        problem = self.problem
        f, addresses, (begin, end, *_) = begin_kernel(module, name, 1 + len(problem.operands) + 2)
        *inputs, self.constants, y = addresses
        views = (*problem.inputs, problem.y)
        for row in f.range("row", begin, end):
            i, image = row.remainder(self.rows.outputs), row.divided(self.rows.outputs)
            (x, *others), planes = self._of_plane([*inputs, y], views, image)
            x = x + i * (self.rows.stride * problem.x.strides[-3])
            # address of the window's corner, which may lie outside of the image
            x = x + -(self.rows.begin * problem.x.strides[-3] + self.cols.begin * problem.x.strides[-2])
            others = [offset(a, [i], [view.strides[-3]]) for a, view in zip(others, views[1:], strict=True)]
            first, last = self.rows.whole
            if problem.kernel[-2] * problem.kernel[-1] > MOST_UNROLLED or first == last:
                self._row(f, x, others, _clamped(self.rows, i), planes)
                continue
            whole, all_of_them = (i - first).below(last - first), i.like(self.rows.kernel)
            with f.when(whole):
                self._row(f, x, others, _Taps(i.like(0), all_of_them, all_of_them, unrolled=True), planes)
            if last - first < self.rows.outputs:
                with f.when(whole.binary("xor", 1)):
                    self._row(f, x, others, _clamped(self.rows, i), planes)

    def _of_plane(self, addresses: list[Value], views: Sequence[View], image: Value) -> tuple[list[Value], list[_Taps]]:
        """Return the addresses of one image, counted over all items.

        For volumes an image is a plane, and its taps are returned too.
        """
        if not self.planes:
            return item_addresses(addresses, views, image), []
        axis, = self.planes
        k, first = image.remainder(axis.outputs), views[0].strides[0]
        x, *others = item_addresses(addresses, views, image.divided(axis.outputs))
        others = [offset(a, [k], [view.strides[0]]) for a, view in zip(others, views[1:], strict=True)]
        return [x + k * (axis.stride * first) + -axis.begin * first, *others], [_clamped(axis, k)]

    def _row(self, f: Function, x: Value, others: list[Value], rows: _Taps, planes: list[_Taps]) -> None:
        """Emit one row of outputs."""
        problem = self.problem
        for start, channels in f.tiles("panel", problem.y.shape[-1], self.tile.vectors * self.isa.lanes):
            lanes = Lanes(self.isa, channels, self.kernel.packed)
            constants = load_constants(lanes, self.constants + start * (4 * problem.program.constants),
                                       problem.program.constants)
            views = (*problem.operands, problem.y)
            here = [offset(a, [start], [v.strides[-1]]) for a, v in zip(others, views, strict=True)]
            for first, count, taps in self.cols.groups:
                scale, addend = self._average(f, [*planes, rows], taps)
                for j, cols in f.tiles("column", count, self.tile.cols, split_tail=True):
                    corner = x + start * problem.x.size + (j + first) * (self.cols.stride * problem.x.strides[-2])
                    self._tile(f, lanes, rows, planes, taps, cols, corner, scale, addend, constants,
                               [offset(a, [j + first], [v.strides[-2]]) for a, v in zip(here, views, strict=True)])

    def _average(self, f: Function, others: list[_Taps], taps: tuple[int, int, int]) -> tuple[Value | None,
                                                                                             Value | None]:
        """Return (1 / count, contribution of padded taps to a sum), in all lanes, for windows with these taps."""
        problem = self.problem
        if problem.kind == "max":
            return None, None
        begin, end, counted = taps
        inside = reduce(mul, (axis.last - axis.first for axis in others)) * (end - begin)
        count = reduce(mul, (axis.counted for axis in others)) * counted if problem.count_include_pad else inside
        scale = f.splat(1 / f.cast("uitofp", count, FLOAT, "count"), self.isa.lanes)
        if not (problem.count_include_pad and problem.pad_value):
            return scale, None
        return scale, f.splat(f.cast("trunc", (count - inside) * problem.pad_value, I32, "padded"), self.isa.lanes)

    def _tile(self, f: Function, lanes: Lanes, rows: _Taps, planes: list[_Taps], taps: tuple[int, int, int], cols: int,
              corner: Value, scale: Value | None, addend: Value | None, constants: list[list[Value]],
              others: list[Value]) -> None:
        """Emit `cols` neighbouring windows; corner: address of tap (0, 0) of the first one."""
        problem, reduction = self.problem, self.kernel.reduction(lanes)
        windows = [[t * self.cols.stride + q * self.cols.dilation for q in range(*taps[:2])] for t in range(cols)]
        columns = sorted({column for window in windows for column in window})
        reduced = self._reduce_planes(f, reduction, rows, planes, columns, corner)
        pixels = []
        for t, window in enumerate(windows):
            pixel = reduced[window[0]] if window else reduction.neutral(corner)
            for column in window[1:]:
                pixel = reduction.combine(pixel, reduced[column])
            pixels.append(self._finish(reduction, pixel, scale, addend, constants, others, t))
        *_, y = others
        targets = [y + t * problem.y.strides[-2] for t in range(cols)]
        if reduction.bytes and problem.y.dtype == "uint8" and not problem.program.instructions:
            for pixel, target in zip(pixels, targets, strict=True):
                f.store(pixel[0], target)
        else:
            store_channels(lanes, problem.y, pixels, targets)

    def _reduce_planes(self, f: Function, reduction: PixelReduction, rows: _Taps, planes: list[_Taps],
                       columns: list[int], corner: Value) -> dict[int, Pixel]:
        """Reduce each column of x over its tap rows in all tap planes."""
        if not planes:
            return self._reduce_rows(f, reduction, rows, columns, corner)
        (axis,), (taps,) = self.planes, planes
        acc = {(column, n): value for column in columns for n, value in enumerate(reduction.neutral(corner))}
        for plane in f.range("tap plane", taps.first, taps.last, acc=acc):
            here = corner + plane * (axis.dilation * self.problem.x.strides[0])
            for column, pixel in self._reduce_rows(f, reduction, rows, columns, here).items():
                so_far = [acc[column, n] for n in range(reduction.registers)]
                acc.update({(column, n): value for n, value in enumerate(reduction.combine(so_far, pixel))})
        return {column: [acc[column, n] for n in range(reduction.registers)] for column in columns}

    def _reduce_rows(self, f: Function, reduction: PixelReduction, rows: _Taps, columns: list[int],
                     corner: Value) -> dict[int, Pixel]:
        """Reduce each column of x over its tap rows."""
        x, step = self.problem.x, self.rows.dilation * self.problem.x.strides[-3]
        if rows.unrolled:
            reduced = {column: reduction.load(corner + column * x.strides[-2]) for column in columns}
            for p in range(1, self.rows.kernel):
                for column in columns:
                    tap = reduction.load(corner + (column * x.strides[-2] + p * step))
                    reduced[column] = reduction.combine(reduced[column], tap)
            return reduced
        acc = {(column, n): value for column in columns for n, value in enumerate(reduction.neutral(corner))}
        for row in f.range("tap row", rows.first, rows.last, acc=acc):
            for column in columns:
                so_far = [acc[column, n] for n in range(reduction.registers)]
                tap = reduction.load(corner + row * step + column * x.strides[-2])
                acc.update({(column, n): value for n, value in enumerate(reduction.combine(so_far, tap))})
        return {column: [acc[column, n] for n in range(reduction.registers)] for column in columns}

    def _finish(self, reduction: PixelReduction, pixel: Pixel, scale: Value | None, addend: Value | None,
                constants: list[list[Value]], others: list[Value], t: int) -> Pixel:
        """Run the program on one reduced window; without a program bytes stay bytes."""
        problem = self.problem
        if reduction.bytes and problem.y.dtype == "uint8" and not problem.program.instructions:
            return pixel
        if addend is not None:
            added = addend if reduction.ints else reduction.lanes.isa.to_float(addend)
            pixel = [value + added for value in pixel]
        values = reduction.finish(pixel)
        if scale is not None:
            values = [value * scale for value in values]
        at = [a + t * view.strides[-2] for view, a in zip(problem.operands, others, strict=False)]
        return finish_pixel(reduction.lanes, problem.program, values, problem.operands, at, constants)


def _clamped(axis: Axis, i: Value) -> _Taps:
    """Return the taps of output i along an axis, clamped to the image."""
    start = i * axis.stride

    def reach(limit: int) -> Value:
        """Return the number of taps before this position of the padded image."""
        left = start.like(limit) - start.at_most(limit)
        return (left + (axis.dilation - 1)).divided(axis.dilation).at_most(axis.kernel)

    inside = axis.begin + axis.extent
    return _Taps(reach(axis.begin), reach(inside), reach(inside + axis.end), unrolled=False)
