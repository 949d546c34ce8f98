"""Norms along the innermost axis. Scale and shift (gamma, beta) are constants of the program.

    layer   y = program((x - mean) / sqrt(variance + epsilon))      variance: the mean of (x - mean)**2
    rms     y = program(x / sqrt(mean of x**2 + epsilon))
    l2      y = program(x / max(sqrt(sum of x**2), epsilon))
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.backends.llvm.codegen.ir_builder import Value
from engines.backends.llvm.kernels.rows.passes import At, Row, RowKernel, fold_rows
from engines.lowering.epilogue.program import Floats


@dataclass(frozen=True)
class Norm(RowKernel):
    kind: str = "layer"
    epsilon: float = 1e-5
    family = "norm"

    def emit_row(self, row: Row) -> None:
        isa, share = row.isa, 1 / self.width
        centre = row.reduce("sum", row.x) * share if self.kind == "layer" else None

        def centred(at: At) -> Value:
            value = row.x(at)
            return value if centre is None else value - centre

        def square(at: At) -> Value:
            value = centred(at)
            return value * value

        total = row.reduce("sum", square)
        if self.kind == "l2":
            scale = 1 / isa.max(isa.unary("sqrt", total), self.epsilon)
        else:
            scale = 1 / isa.unary("sqrt", total * share + self.epsilon)
        row.store(lambda at: centred(at) * scale)

    def meaning(self, x: Floats) -> Floats:
        share, epsilon = np.float32(1 / self.width), np.float32(self.epsilon)
        if self.kind == "layer":
            x = x - fold_rows("sum", x) * share
        total = fold_rows("sum", x * x)
        if self.kind == "l2":
            scale = np.float32(1) / np.maximum(np.sqrt(total), epsilon)
        else:
            scale = np.float32(1) / np.sqrt(total * share + epsilon)
        return np.asarray(x * scale, np.float32)
