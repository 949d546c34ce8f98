"""The kernels along rows: softmax, norms, local response normalisation, reductions, each as the passes over one row."""
from __future__ import annotations

import math

from engines.backends.llvm.kernels.kernel import solves
from engines.backends.llvm.kernels.rows.passes import At, Row, RowKernel, live
from engines.codegen.ir_builder import Value
from engines.lowering.problems.rows import EXP, EXP_OF_NEGATIVE, LOG, ROOTS, WIDEST_LRN, Lrn, Norm, Reduce, Softmax

KEPT = 1 << 13          # widest row whose exponentials are kept on the stack (32 KiB)
MARGIN = WIDEST_LRN     # zeros kept before and behind the squares of a row


def seen(peak: Value) -> Value:
    """Whether there is anything to see in a row."""
    return peak.compare("ogt", -math.inf)


def share(peak: Value, total: Value) -> Value:
    """What the exponentials of a row are multiplied by: 1 / their sum, or 0 where there was nothing to see."""
    return peak.f.select(seen(peak), 1 / total, total.like(0), "share")


@solves(Softmax)
class SoftmaxKernel(RowKernel[Softmax]):
    """The exponentials of a row are kept on the stack, or computed twice where it is too wide."""

    @property
    def scratch(self) -> int:
        return 0 if self.problem.log or self.problem.width > KEPT else self.problem.width

    def emit_row(self, row: Row) -> None:
        peak = row.reduce("max", row.x)

        def exponential(at: At) -> Value:
            value: Value = EXP_OF_NEGATIVE(row.isa, row.x(at) - peak)
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


@solves(Norm)
class NormKernel(RowKernel[Norm]):
    def emit_row(self, row: Row) -> None:
        isa, kind, share = row.isa, self.problem.kind, 1 / row.width
        centre = row.reduce("sum", row.x) * share if kind == "layer" else None

        def centred(at: At) -> Value:
            value = row.x(at)
            return value if centre is None else value - centre

        def square(at: At) -> Value:
            value = centred(at)
            return value * value

        total = row.reduce("sum", square)
        if kind == "l2":
            scale = 1 / isa.max(isa.unary("sqrt", total), self.problem.epsilon)
        else:
            scale = 1 / isa.unary("sqrt", total * share + self.problem.epsilon)
        row.store(lambda at: centred(at) * scale)


@solves(Lrn)
class LrnKernel(RowKernel[Lrn]):
    """The squares of a row are kept with margins."""

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


@solves(Reduce)
class ReduceKernel(RowKernel[Reduce]):
    def emit_row(self, row: Row) -> None:
        row.store_one(row.reduce(self.problem.kind, row.x))
