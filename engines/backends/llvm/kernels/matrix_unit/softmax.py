"""Softmax of the scores of a register of queries, whose sums were left in scratch memory.

    for row:  x       = scale * sum + mask      -> x, in place; the peak of each lane -> scratch
    peak    = peaks of all rows
    for row:  p       = e**(x - peak)           -> p; its sum in each lane -> scratch
    inverse = 1 / sums of all rows

The reductions over the lanes of 16 rows are one: they are transposed on the way. Rows beyond the last query hold what
scratch memory held; their results are not used.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.backends.llvm.kernels.common.access import reduced_lanes
from engines.backends.llvm.kernels.matmul.softmax import AttentionSoftmax
from engines.backends.llvm.kernels.rows.passes import RowVector, combine, reduce_vectors
from engines.codegen.ir_builder import Value
from engines.codegen.row_formulas import softmax_scale

RowScores = Callable[[Value, RowVector], Value]     # (row, vector of it) -> scores


@dataclass(frozen=True)
class GroupSoftmax(AttentionSoftmax):
    """Softmax of as many rows as a vector has lanes."""

    def group_peaks(self, peaks: Value, lanes: Value, rows: Value, score: RowScores) -> None:
        """Emit the peaks of `rows` rows. lanes: scratch memory, a vector for each row."""
        f, isa = peaks.f, self.isa
        for row in f.loop("peak", rows):
            def vector_of(at: RowVector, row: Value = row) -> Value:
                return score(row, at)

            f.store(reduce_vectors(f, isa, self.keys, "max", vector_of), lanes + row * isa.bytes, isa.bytes)
        f.store(self._of_rows("max", lanes, isa.floats), peaks, isa.bytes)

    def inverses(self, peaks: Value, totals: Value, inverse: Value, rows: Value) -> None:
        f, isa = peaks.f, self.isa
        total = self._of_rows("sum", totals, isa.ints if self.exact else isa.floats)
        peak = f.load(isa.floats, peaks, isa.bytes, "peaks")
        f.store(softmax_scale(peak, isa.to_float(total) if self.exact else total), inverse, isa.bytes)

    def _of_rows(self, kind: str, lanes: Value, type_: str) -> Value:
        """Reduce a vector for each row in memory to one vector, which has a lane for each row."""
        size = self.isa.bytes
        rows = [lanes.f.load(type_, lanes + row * size, size, "row") for row in range(self.isa.lanes)]
        return reduced_lanes(rows, lambda a, b: combine(self.isa, kind, a, b))
