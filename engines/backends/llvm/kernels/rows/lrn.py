"""Local response normalisation across neighbouring channels, the innermost axis: the squares are kept with margins."""
from __future__ import annotations

from engines.backends.llvm.codegen.ir_builder import Value
from engines.backends.llvm.kernels.kernel import solves
from engines.backends.llvm.kernels.rows.passes import At, Row, RowKernel, live
from engines.lowering.problems.rows import EXP, LOG, ROOTS, WIDEST_LRN, Lrn

MARGIN = WIDEST_LRN     # zeros kept before and behind the squares of a row


@solves(Lrn)
class LrnKernel(RowKernel[Lrn]):
    @property
    def scratch(self) -> int:
        return self.problem.width + 3 * MARGIN      # one more than the margins: the row is rounded up

    def emit_row(self, row: Row) -> None:
        lrn = self.problem
        assert lrn.size <= MARGIN, f"a window of {lrn.size} channels; the margins have {MARGIN}"
        f, lanes = row.f, row.isa.lanes
        zero, behind = f.constant(0, row.isa.floats), -(-lrn.width // lanes) * lanes
        before = (lrn.size - 1) // 2
        for first in range(-(-before // lanes) * -lanes, 0, lanes):
            row.keep(zero, At(f.constant(0, "i64"), lanes), MARGIN + first)
        for first in range(behind, behind + lrn.size - 1 - before, lanes):
            row.keep(zero, At(f.constant(0, "i64"), lanes), MARGIN + first)

        def square(at: At) -> Value:
            value = row.x(at)
            return row.keep(live(row.isa, value * value, at.count, 0), at, MARGIN)

        def normalised(at: At) -> Value:
            first = MARGIN - before
            total = row.kept(at, first)
            for k in range(1, lrn.size):
                total = total + row.kept(at, first + k)
            base = total * (lrn.alpha / lrn.size) + lrn.bias
            if lrn.beta in ROOTS:
                power: Value = ROOTS[lrn.beta](base, lambda value: row.isa.unary("sqrt", value))
                return row.x(at) / power
            result: Value = row.x(at) * EXP(row.isa, LOG(row.isa, base) * -lrn.beta)
            return result

        row.visit(square)
        row.store(normalised)
