"""Resize of images [height, width, channels]: nearest, linear, cubic, or any weights that are separable.

    y[n, i, j, c] = program(sum over p of u[i, p] * (sum over q of v[j, q] * x[n, rows[i, p], columns[j, q], c]))

A nearest neighbour is one tap of weight 1 on each axis. Which taps, and their weights, are tables: they hold all that
coordinate modes are about, and the text of the kernel depends on shapes only.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import FLOAT, I8, I64, Function, Module, Value, vector
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.common.access import (
    PANEL,
    item_addresses,
    load_channels,
    load_constants,
    offset,
    panels,
    run_program,
    store_channels,
)
from engines.backends.llvm.kernels.kernel import Grid, ImageKernel, Tactic, Window, begin_kernel, pack_channels
from engines.lowering.epilogue.functions import fma
from engines.lowering.epilogue.program import load_meaning, store_meaning
from engines.lowering.problems.problem import Array

Tap = tuple[Value, Value | None]        # byte offset, weight in all lanes (None: the one tap of weight 1)


def taps_of(matrix: Array) -> tuple[Array, Array]:
    """Weights [out, in] of one axis -> (index, weight) [out, taps]: those that are not 0, padded with weight 0."""
    taps = max(int((matrix != 0).sum(1).max()), 1)
    index = np.argsort(matrix == 0, axis=1, kind="stable")[:, :taps]
    return index, np.take_along_axis(matrix, index, 1).astype(np.float32)


@dataclass(frozen=True)
class Resize(ImageKernel):
    """taps: of rows, of columns."""
    taps: tuple[int, int] = (1, 1)
    family = "resize"

    @property
    def packed(self) -> bool:
        return self.y.dtype == "uint8" and self.x.dtype == "uint8"

    @property
    def copies(self) -> bool:
        """Bytes are only moved."""
        return self.taps == (1, 1) and self.packed and not self.program.instructions

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(self.y.shape[0])

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        return [Window.whole(self.x), *(Window.along(view) for view in (*self.operands, self.y))]

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, 1 + len(self.operands) + 6)
        *inputs, row_taps, row_weights, column_taps, column_weights, constants, y = addresses
        for row in f.range("row", begin, end):
            i = row.remainder(self.y.shape[0])
            x, *others = item_addresses([*inputs, y], (*self.inputs, self.y), row.divided(self.y.shape[0]))
            rows = self._taps(f, isa, 0, i, row_taps, row_weights)
            for j in f.loop("column", self.y.shape[1]):
                columns = self._taps(f, isa, 1, j, column_taps, column_weights)
                here = [offset(a, [i, j], view.strides[:2])
                        for a, view in zip(others, (*self.operands, self.y), strict=True)]
                for start, count in f.tiles("channel", self.y.shape[2], PANEL * isa.lanes):
                    at = [a + start * view.size for a, view in zip(here, (*self.operands, self.y), strict=True)]
                    self._panel(f, isa, x + start * self.x.size, rows, columns, at,
                                constants + start * (4 * self.program.constants), count)

    def _taps(self, f: Function, isa: Isa, axis: int, i: Value, offsets: Value, weights: Value) -> list[Tap]:
        """Of output i of an axis."""
        count = self.taps[axis]
        first = i * count
        return [(f.load(I64, offsets + first * 8 + k * 8, hint="tap"),
                 f.splat(f.load(FLOAT, weights + first * 4 + k * 4, hint="weight"), isa.lanes) if count > 1 else None)
                for k in range(count)]

    def _panel(self, f: Function, isa: Isa, x: Value, rows: list[Tap], columns: list[Tap], at: list[Value],
               constants: Value, count: int) -> None:
        if self.copies:
            row = f.load(vector(count, I8), x + rows[0][0] + columns[0][0], hint="pixel")
            f.store(row, at[-1])
            return
        lanes = Lanes(isa, count, self.packed)
        lines = [_weighted(isa, [(lanes.load(self.x.dtype, x + row + column), weight) for column, weight in columns])
                 for row, _ in rows]
        total = _weighted(isa, [(line, weight) for line, (_, weight) in zip(lines, rows, strict=True)])
        operands = [load_channels(lanes, view, a) for view, a in zip(self.operands, at, strict=False)]
        numbers = load_constants(lanes, constants, self.program.constants)
        store_channels(lanes, self.y, [run_program(lanes, self.program, total, operands, numbers)], at[-1:])

    # ---- constants and meaning
    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"rows", "columns": (index, weight), each [outputs, taps], as taps_of makes them -> byte offsets, weights;
        "program": float32 [1] or [channels] -> [panel][constant][vector][lane]."""
        channels = self.y.shape[2]
        tables: list[Array] = []
        for axis, key in enumerate(("rows", "columns")):
            index, weight = constants[key]
            tables.append(np.asarray(index, np.int64).ravel() * self.x.strides[axis])
            tables.append(np.asarray(weight, np.float32).ravel())
        return (*tables, pack_channels(constants["program"], channels, panels(isa, channels, self.packed)))

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        (rows, u), (columns, v) = constants["rows"], constants["columns"]
        wide = load_meaning(self.x.dtype, x)
        lines = _sum([(wide[:, :, columns[:, q]], v[:, q, None]) for q in range(self.taps[1])])
        total = _sum([(lines[:, rows[:, p]], u[:, p, None, None]) for p in range(self.taps[0])])
        others = [load_meaning(view.dtype, operand) for view, operand in zip(self.operands, operands, strict=True)]
        return (store_meaning(self.y.dtype, self.program.meaning(total, others, constants["program"])),)


def _weighted(isa: Isa, terms: list[tuple[list[Value], Value | None]]) -> list[Value]:
    """The sum of weight * value, vector by vector; a lone term has weight 1."""
    total, weight = terms[0]
    if weight is None:
        return total
    total = [value * weight for value in total]
    for values, weight in terms[1:]:
        assert weight is not None
        total = [isa.fma(value, weight, so_far) for value, so_far in zip(values, total, strict=True)]
    return total


def _sum(terms: list[tuple[Array, Array]]) -> Array:
    total, weight = terms[0]
    if len(terms) == 1:
        return total
    total = total * np.asarray(weight, np.float32)
    for value, weight in terms[1:]:
        total = fma(value, np.asarray(weight, np.float32), total)
    return total
