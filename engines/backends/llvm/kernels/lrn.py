"""Local response normalisation across neighbouring channels, the innermost axis.

    y[c] = program(x[c] * (bias + alpha / size * sum over k of x[c - before + k]**2) ** -beta)      k in 0..size-1

before = (size - 1) // 2, and channels that are not there count as 0. The power is e**(-beta * log t), t > 0.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.backends.llvm.emit import Value
from engines.backends.llvm.program import INSTRUCTIONS, Floats
from engines.backends.llvm.rows import PARTIALS, At, Row, RowKernel, live

MARGIN = PARTIALS       # zeros kept before and behind the squares of a row; no window is larger
EXP, LOG = INSTRUCTIONS["exp"], INSTRUCTIONS["log"]


@dataclass(frozen=True)
class Lrn(RowKernel):
    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0
    family = "lrn"

    @property
    def scratch(self) -> int:
        return self.width + 3 * MARGIN      # one more than the margins: the row is rounded up

    def emit_row(self, row: Row) -> None:
        assert self.size <= MARGIN, f"a window of {self.size} channels; the margins have {MARGIN}"
        f, lanes = row.f, row.isa.lanes
        zero, behind = f.constant(0, row.isa.floats), -(-self.width // lanes) * lanes
        for first in range(0, MARGIN, lanes):
            row.keep(zero, At(f.constant(first, "i64"), lanes))
            row.keep(zero, At(f.constant(behind + first, "i64"), lanes), MARGIN)

        def square(at: At) -> Value:
            value = row.x(at)
            return row.keep(live(row.isa, value * value, at.count, 0), at, MARGIN)

        def normalised(at: At) -> Value:
            first = MARGIN - (self.size - 1) // 2
            total = row.kept(at, first)
            for k in range(1, self.size):
                total = total + row.kept(at, first + k)
            logarithm = LOG.emit(row.isa, total * (self.alpha / self.size) + self.bias)
            return row.x(at) * EXP.emit(row.isa, logarithm * -self.beta)

        row.visit(square)
        row.store(normalised)

    def meaning(self, x: Floats) -> Floats:
        before = (self.size - 1) // 2
        squares = np.pad(x * x, [(0, 0)] * (x.ndim - 1) + [(before, self.size - 1 - before)])
        total = squares[..., :self.width]
        for k in range(1, self.size):
            total = total + squares[..., k:k + self.width]
        logarithm = LOG.meaning(total * np.float32(self.alpha / self.size) + np.float32(self.bias))
        return np.asarray(x * EXP.meaning(logarithm * np.float32(-self.beta)), np.float32)
