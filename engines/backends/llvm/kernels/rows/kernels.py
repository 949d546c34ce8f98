"""Kernels along rows: softmax, normalisations, local response normalisation, reductions, as passes over a row."""
from __future__ import annotations

from infer_server.engines.backends.llvm.kernels.kernel import solves
from infer_server.engines.backends.llvm.kernels.rows.passes import (
    RowCode,
    RowKernel,
    RowVector,
    live,
)
from infer_server.engines.backends.llvm.kernels.rows.scaling import scale_row
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.row_formulas import norm, response, softmax
from infer_server.engines.lowering.problems.rows import (
    WIDEST_LRN,
    Lrn,
    Norm,
    Reduce,
    ScaledNorm,
    ScaledRows,
    Softmax,
)

KEPT = 1 << 13          # widest row whose exponentials are kept on the stack (32 KiB)
MARGIN = WIDEST_LRN     # zeros before and after the squares of a row


@solves(Softmax)
class SoftmaxKernel(RowKernel[Softmax]):
    """Softmax of rows. Exponentials are kept on the stack, or computed twice if the row is too wide."""

    @property
    def scratch(self) -> int:
        return 0 if self.problem.log or self.problem.width > KEPT else self.problem.width

    def emit_row(self, row: RowCode) -> None:
        keeps = (row.save, row.load_saved) if self.scratch else (None, None)
        softmax(row, row.isa, self.problem.log, *keeps)


@solves(Norm)
class NormKernel(RowKernel[Norm]):
    """Layer, RMS and L2 normalisation of rows."""
    def emit_row(self, row: RowCode) -> None:
        norm(row, row.isa, self.problem)


@solves(ScaledRows)
class ScaledRowsKernel(RowKernel[ScaledRows]):
    """Division of rows by their scales, in two passes."""
    def emit_row(self, row: RowCode) -> None:
        scale_row(row, self.problem)


@solves(ScaledNorm)
class ScaledNormKernel(RowKernel[ScaledNorm]):
    """Norm of a row, which is still in the first-level cache when it is divided by its scale."""
    def emit_row(self, row: RowCode) -> None:
        norm(row, row.isa, self.problem)
        scale_row(row.then(self.problem.scaled), self.problem.scaled)


@solves(Lrn)
class LrnKernel(RowKernel[Lrn]):
    """Local response normalisation. The squares of a row are kept on the stack, with margins of zeros."""

    @property
    def scratch(self) -> int:
        return self.problem.width + 3 * MARGIN      # two margins, and one for rounding up the row

    def emit_row(self, row: RowCode) -> None:
        lrn = self.problem
        assert lrn.size <= MARGIN, f"a window of {lrn.size} channels; the margins have {MARGIN}"
        f, lanes = row.f, row.isa.lanes
        zero, behind = f.constant(0, row.isa.floats), -(-lrn.width // lanes) * lanes
        before = (lrn.size - 1) // 2
        for first in range(-(-before // lanes) * -lanes, 0, lanes):
            row.save(zero, RowVector(f.constant(0, "i64"), lanes), MARGIN + first)
        for first in range(behind, behind + lrn.size - 1 - before, lanes):
            row.save(zero, RowVector(f.constant(0, "i64"), lanes), MARGIN + first)

        def square(at: RowVector) -> Value:
            value = row.x(at)
            return row.save(live(row.isa, value * value, at.count, 0), at, MARGIN)

        def normalised(at: RowVector) -> Value:
            first = MARGIN - before
            total = row.load_saved(at, first)
            for k in range(1, lrn.size):
                total = total + row.load_saved(at, first + k)
            return response(row.isa, lrn, lambda: row.x(at), total)

        row.visit(square)
        row.store(normalised)


@solves(Reduce)
class ReduceKernel(RowKernel[Reduce]):
    """Sum, max or min of rows."""
    def emit_row(self, row: RowCode) -> None:
        row.store_one(row.reduce(self.problem.kind, row.x))
