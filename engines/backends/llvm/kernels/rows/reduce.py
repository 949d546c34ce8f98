"""Reductions along the innermost axis to one element: y = program(sum, max or min of x).

A mean's 1 / width is a constant of the program; squares and absolute values are instructions of the prologue.
"""
from __future__ import annotations

from dataclasses import dataclass

from engines.backends.llvm.kernels.rows.passes import Row, RowKernel, fold_rows
from engines.lowering.epilogue.program import Floats


@dataclass(frozen=True)
class Reduce(RowKernel):
    """y: [..., 1]. The constants of both programs are single numbers."""
    kind: str = "sum"
    family = "reduce"

    @property
    def constants_width(self) -> int:
        return 1

    def emit_row(self, row: Row) -> None:
        row.store_one(row.reduce(self.kind, row.x))

    def meaning(self, x: Floats) -> Floats:
        return fold_rows(self.kind, x)
