"""Softmax and LogSoftmax: the exponentials of a row are kept on the stack, or computed twice where it is too wide."""
from __future__ import annotations

import math

from engines.backends.llvm.codegen.ir_builder import Value
from engines.backends.llvm.kernels.kernel import solves
from engines.backends.llvm.kernels.rows.passes import At, Row, RowKernel
from engines.lowering.problems.rows import EXP, LOG, Softmax

KEPT = 1 << 13      # widest row whose exponentials are kept on the stack (32 KiB)


def share(peak: Value, total: Value) -> Value:
    """What the exponentials of a row are multiplied by: 1 / their sum, or 0 where there was nothing to see."""
    return peak.f.select(peak.compare("ogt", -math.inf), 1 / total, total.like(0), "share")


@solves(Softmax)
class SoftmaxKernel(RowKernel[Softmax]):
    @property
    def scratch(self) -> int:
        return 0 if self.problem.log or self.problem.width > KEPT else self.problem.width

    def emit_row(self, row: Row) -> None:
        peak = row.reduce("max", row.x)

        def exponential(at: At) -> Value:
            value: Value = EXP(row.isa, row.x(at) - peak)
            return value

        if self.problem.log:
            logarithm = LOG(row.isa, row.reduce("sum", exponential))
            row.store(lambda at: row.x(at) - peak - logarithm)
            return
        if not self.scratch:
            scale = share(peak, row.reduce("sum", exponential))
            row.store(lambda at: exponential(at) * scale)
            return
        scale = share(peak, row.reduce("sum", lambda at: row.keep(exponential(at), at)))
        row.store(lambda at: row.kept(at) * scale)
