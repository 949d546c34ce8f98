"""Resize of images by tables of taps, so that the generated code depends on shapes only."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import item_addresses, offset
from infer_server.engines.backends.llvm.kernels.common.pixels import (
    PANEL,
    finish_pixel,
    load_constants,
    pack_panels,
    store_channels,
)
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import FLOAT, I8, I64, vector
from infer_server.engines.lowering.problems.images import Resize
from infer_server.engines.lowering.problems.problem import Array

Tap = tuple[Value, Value | None]        # (byte offset, weight in all lanes or None for a single tap of weight 1)


@solves(Resize)
class ResizeKernel(Kernel[Resize]):
    @property
    def packed(self) -> bool:
        return self.problem.x.dtype == self.problem.y.dtype == "uint8"

    @property
    def copies(self) -> bool:
        """Return True if bytes are only copied."""
        return self.problem.taps == (1, 1) and self.packed and not self.problem.program.instructions

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(self.problem.y.shape[0])

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        problem = self.problem
        return [Window.whole(problem.x), *(Window.along(view) for view in (*problem.operands, problem.y))]

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        others, rows_per_item = (*problem.operands, problem.y), problem.y.shape[0]
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(problem.inputs) + 6)
        *inputs, row_taps, row_weights, column_taps, column_weights, constants, y = addresses
        for row in f.range("row", begin, end):
            i = row.remainder(rows_per_item)
            x, *starts = item_addresses([*inputs, y], (problem.x, *others), row.divided(rows_per_item))
            rows = self._taps(f, isa, 0, i, row_taps, row_weights)
            for j in f.loop("column", problem.y.shape[1]):
                columns = self._taps(f, isa, 1, j, column_taps, column_weights)
                here = [offset(a, [i, j], view.strides[:2]) for a, view in zip(starts, others, strict=True)]
                for start, count in f.tiles("channel", problem.y.shape[2], PANEL * isa.lanes):
                    at = [a + start * view.strides[2] for a, view in zip(here, others, strict=True)]
                    self._panel(f, isa, x + start * problem.x.size, rows, columns, at,
                                constants + start * (4 * problem.program.constants), count)

    def _taps(self, f: Function, isa: Isa, axis: int, i: Value, offsets: Value, weights: Value) -> list[Tap]:
        """Load the taps of output i of an axis."""
        count = self.problem.taps[axis]
        first = i * count
        return [(f.load(I64, offsets + first * 8 + k * 8, hint="tap"),
                 f.splat(f.load(FLOAT, weights + first * 4 + k * 4, hint="weight"), isa.lanes) if count > 1 else None)
                for k in range(count)]

    def _panel(self, f: Function, isa: Isa, x: Value, rows: list[Tap], columns: list[Tap], at: list[Value],
               constants: Value, count: int) -> None:
        problem = self.problem
        if self.copies:
            row = f.load(vector(count, I8), x + rows[0][0] + columns[0][0], hint="pixel")
            f.store(row, at[-1])
            return
        lanes = Lanes(isa, count, self.packed)
        lines = [_weighted(isa, [(lanes.load(problem.x.dtype, x + row + column), weight) for column, weight in columns])
                 for row, _ in rows]
        total = _weighted(isa, [(line, weight) for line, (_, weight) in zip(lines, rows, strict=True)])
        numbers = load_constants(lanes, constants, problem.program.constants)
        pixel = finish_pixel(lanes, problem.program, total, problem.operands, at[:-1], numbers)
        store_channels(lanes, problem.y, [pixel], at[-1:])

    # ---- constants and meaning
    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Convert "rows" and "columns", each (index, weight) of shape [outputs, taps], to byte offsets and weights."""
        problem = self.problem
        tables: list[Array] = []
        for axis, key in enumerate(("rows", "columns")):
            index, weight = constants[key]
            tables.append(np.asarray(index, np.int64).ravel() * problem.x.strides[axis])
            tables.append(np.asarray(weight, np.float32).ravel())
        return (*tables, pack_panels(isa, constants, problem.y.shape[2], self.packed))


def _weighted(isa: Isa, terms: list[tuple[list[Value], Value | None]]) -> list[Value]:
    """Return the sum of weight * value, vector by vector; a single term has weight 1."""
    total, weight = terms[0]
    if weight is None:
        return total
    total = [value * weight for value in total]
    for values, weight in terms[1:]:
        assert weight is not None
        total = [isa.fma(value, weight, so_far) for value, so_far in zip(values, total, strict=True)]
    return total
