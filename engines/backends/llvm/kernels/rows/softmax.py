"""Softmax and LogSoftmax along the innermost axis.

    y = program(e**(x - max x) / sum of e**(x - max x))         log: program(x - max x - log(sum of e**(x - max x)))

A row of minus infinity, a query that may look at nothing, becomes zeros.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engines.backends.llvm.codegen.ir_builder import Value
from engines.backends.llvm.kernels.rows.passes import At, Row, RowKernel, fold_rows
from engines.lowering.epilogue.program import INSTRUCTIONS, NUMPY, Floats

KEPT = 1 << 13      # widest row whose exponentials are kept on the stack (32 KiB); a wider one computes them twice
EXP, LOG = INSTRUCTIONS["exp_of_moderate"], INSTRUCTIONS["log_of_positive"]


def share(peak: Value, total: Value) -> Value:
    """What the exponentials of a row are multiplied by: 1 / their sum, or 0 where there was nothing to see."""
    return peak.f.select(peak.compare("ogt", -math.inf), 1 / total, total.like(0), "share")


def share_meaning(peak: Floats, total: Floats) -> Floats:
    return np.where(peak > -np.inf, np.float32(1) / np.where(total == 0, np.float32(1), total), np.float32(0))


def less_peak(x: Floats, peak: Floats) -> Floats:
    """x - peak; where the peak is minus infinity, x, for `share` will make it zeros."""
    return x - np.where(peak > -np.inf, peak, np.float32(0))


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
            value: Value = EXP(row.isa, row.x(at) - peak)
            return value

        if self.log:
            logarithm = LOG(row.isa, row.reduce("sum", exponential))
            row.store(lambda at: row.x(at) - peak - logarithm)
            return
        if not self.scratch:
            scale = share(peak, row.reduce("sum", exponential))
            row.store(lambda at: exponential(at) * scale)
            return
        scale = share(peak, row.reduce("sum", lambda at: row.keep(exponential(at), at)))
        row.store(lambda at: row.kept(at) * scale)

    def meaning(self, x: Floats) -> Floats:
        peak = fold_rows("max", x)
        shifted = less_peak(x, peak)
        exponentials = np.asarray(EXP(NUMPY, shifted), np.float32)
        total = fold_rows("sum", exponentials)
        result = shifted - LOG(NUMPY, total) if self.log else exponentials * share_meaning(peak, total)
        return np.asarray(result, np.float32)
