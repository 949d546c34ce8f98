"""Reductions along the innermost axis to one element."""
from __future__ import annotations

from engines.backends.llvm.kernels.kernel import solves
from engines.backends.llvm.kernels.rows.passes import Row, RowKernel
from engines.lowering.problems.rows import Reduce


@solves(Reduce)
class ReduceKernel(RowKernel[Reduce]):
    def emit_row(self, row: Row) -> None:
        row.store_one(row.reduce(self.problem.kind, row.x))
