"""Resize by separable weights: one thread for a few channels of an output pixel.

    y[n, i, j, c] = program(sum over p of u[i, p] * (sum over q of v[j, q] * x[n, rows[i, p], columns[j, q], c]))
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.backends.cuda.codegen.module import wide
from infer_server.engines.backends.cuda.kernels.access import load_channels
from infer_server.engines.backends.cuda.kernels.elementwise.threads import ProgramKernel
from infer_server.engines.backends.cuda.kernels.kernel import Tactic, solves
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import FLOAT, I32
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.images import Resize
from infer_server.engines.lowering.problems.problem import Array

Taps = list[tuple[Value, Value]]        # (index, weight)


@solves(Resize)
class ResizeByThreads(ProgramKernel[Resize]):
    """Kernel with one thread for a few channels of a pixel."""
    tables = 3

    @property
    def program(self) -> EpilogueProgram:
        return self.problem.program

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return the taps of rows, then of columns, as [outputs][taps] pairs (index, bits of the float32 weight)."""
        tables = (np.stack([np.asarray(index, np.int32), np.asarray(weight, np.float32).view(np.int32)], -1)
                  for index, weight in (constants["rows"], constants["columns"]))
        return (*tables, *super().pack(tactic, constants))

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        problem, x, inputs = self.problem, self.problem.x, len(self.problem.inputs)
        rows, columns = self.y.shape[:2]
        item, rest = pixel.divided(rows * columns), pixel.remainder(rows * columns)
        base = operands[0] + wide(item) * x.item + wide(channel) * x.strides[2]
        down = self._taps(operands[inputs], rest.divided(columns), problem.taps[0])
        right = self._taps(operands[inputs + 1], rest.remainder(columns), problem.taps[1])
        lines = []
        for row, weight in down:
            line = base + wide(row) * x.strides[0]
            pixels = [(load_channels(self.gpu, x, line + wide(column) * x.strides[1], self.each), v)
                      for column, v in right]
            lines.append((self._weighted(pixels), weight))
        self.finish(operands, pixel, channel, self._weighted(lines), range(1, inputs), inputs + 2)

    def _taps(self, table: Value, index: Value, count: int) -> Taps:
        f, at = table.f, table + wide(index) * (8 * count)
        return [(f.load(I32, at + 8 * n, 4, "index"), f.load(FLOAT, at + (8 * n + 4), 4, "weight"))
                for n in range(count)]

    def _weighted(self, terms: Sequence[tuple[list[Value], Value]]) -> list[Value]:
        """Return the sums of value * weight; a single term has weight 1."""
        (total, weight), *others = terms
        if others:
            total = [value * weight for value in total]
        for values, weight in others:
            total = [self.gpu.fma(value, weight, t) for value, t in zip(values, total, strict=True)]
        return total
