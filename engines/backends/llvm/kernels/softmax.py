"""Softmax and LogSoftmax along the innermost axis.

    y = program(e**(x - max x) / sum of e**(x - max x))         log: program(x - max x - log(sum of e**(x - max x)))
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.backends.llvm.emit import Value
from engines.backends.llvm.program import INSTRUCTIONS, Floats
from engines.backends.llvm.rows import At, Row, RowKernel, fold_rows

KEPT = 1 << 13      # widest row whose exponentials are kept on the stack (32 KiB); a wider one computes them twice
EXP, LOG = INSTRUCTIONS["exp"], INSTRUCTIONS["log"]


@dataclass(frozen=True)
class Softmax(RowKernel):
    log: bool = False
    family = "softmax"

    @property
    def scratch(self) -> int:
        return 0 if self.log or self.width > KEPT else self.width

    def emit_row(self, row: Row) -> None:
        peak = row.reduce("max", row.x)

        def exponential(at: At) -> Value:
            return EXP.emit(row.isa, row.x(at) - peak)

        if self.log:
            logarithm = LOG.emit(row.isa, row.reduce("sum", exponential))
            row.store(lambda at: row.x(at) - peak - logarithm)
            return
        if not self.scratch:
            scale = 1 / row.reduce("sum", exponential)
            row.store(lambda at: exponential(at) * scale)
            return
        scale = 1 / row.reduce("sum", lambda at: row.keep(exponential(at), at))
        row.store(lambda at: row.kept(at) * scale)

    def meaning(self, x: Floats) -> Floats:
        shifted = x - fold_rows("max", x)
        exponentials = np.asarray(EXP.meaning(shifted), np.float32)
        total = fold_rows("sum", exponentials)
        result = shifted - LOG.meaning(total) if self.log else exponentials * (np.float32(1) / total)
        return np.asarray(result, np.float32)
