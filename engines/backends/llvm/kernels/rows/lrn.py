"""Local response normalisation across neighbouring channels, the innermost axis.

    y[c] = program(x[c] * (bias + alpha / size * sum over k of x[c - before + k]**2) ** -beta)      k in 0..size-1

before = (size - 1) // 2, and channels that are not there count as 0. The power is e**(-beta * log t), t > 0; those of
quarters that networks use are roots.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import Value
from engines.backends.llvm.kernels.rows.passes import PARTIALS, At, Row, RowKernel, live
from engines.lowering.epilogue.program import INSTRUCTIONS, NUMPY, Floats

MARGIN = PARTIALS       # zeros kept before and behind the squares of a row; no window is larger
EXP, LOG = INSTRUCTIONS["exp_of_moderate"], INSTRUCTIONS["log_of_positive"]
ROOTS: dict[float, Callable[[Any, Callable[[Any], Any]], Any]] = {     # beta -> t**beta, given a square root
    0.5: lambda t, root: root(t),
    0.75: lambda t, root: root(t) * root(root(t)),
    1.0: lambda t, root: t}


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
        before = (self.size - 1) // 2
        for first in range(-(-before // lanes) * -lanes, 0, lanes):
            row.keep(zero, At(f.constant(0, "i64"), lanes), MARGIN + first)
        for first in range(behind, behind + self.size - 1 - before, lanes):
            row.keep(zero, At(f.constant(0, "i64"), lanes), MARGIN + first)

        def square(at: At) -> Value:
            value = row.x(at)
            return row.keep(live(row.isa, value * value, at.count, 0), at, MARGIN)

        def normalised(at: At) -> Value:
            first = MARGIN - before
            total = row.kept(at, first)
            for k in range(1, self.size):
                total = total + row.kept(at, first + k)
            base = total * (self.alpha / self.size) + self.bias
            if self.beta in ROOTS:
                power: Value = ROOTS[self.beta](base, lambda value: row.isa.unary("sqrt", value))
                return row.x(at) / power
            result: Value = row.x(at) * EXP(row.isa, LOG(row.isa, base) * -self.beta)
            return result

        row.visit(square)
        row.store(normalised)

    def meaning(self, x: Floats) -> Floats:
        before = (self.size - 1) // 2
        squares = np.pad(x * x, [(0, 0)] * (x.ndim - 1) + [(before, self.size - 1 - before)])
        total = squares[..., :self.width]
        for k in range(1, self.size):
            total = total + squares[..., k:k + self.width]
        base = total * np.float32(self.alpha / self.size) + np.float32(self.bias)
        if self.beta in ROOTS:
            return np.asarray(x / ROOTS[self.beta](base, np.sqrt), np.float32)
        return np.asarray(x * EXP(NUMPY, LOG(NUMPY, base) * np.float32(-self.beta)), np.float32)
