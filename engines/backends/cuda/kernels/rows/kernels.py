"""Softmax, norms, local response normalisation, reductions: each as the passes over one row."""
from __future__ import annotations

import math

from engines.backends.cuda.kernels.kernel import solves
from engines.backends.cuda.kernels.rows.rows import At, Row, RowByWarp
from engines.codegen.ir_builder import Value
from engines.lowering.problems.rows import EXP, EXP_OF_NEGATIVE, LOG, ROOTS, Lrn, Norm, Reduce, Softmax


@solves(Softmax)
class SoftmaxByWarp(RowByWarp[Softmax]):
    def write_row(self, row: Row) -> None:
        peak = row.reduce("max", row.x)

        def exponential(at: At) -> Value:
            value: Value = EXP_OF_NEGATIVE(row.gpu, row.x(at) - peak)
            return value

        total = row.reduce("sum", exponential)
        if self.problem.log:
            logarithm: Value = LOG(row.gpu, total)
            row.store(lambda at: row.x(at) - peak - logarithm)
            return
        share = row.f.select(peak.compare("ogt", -math.inf), 1 / total, total.like(0), "share")
        row.store(lambda at: exponential(at) * share)


@solves(Norm)
class NormByWarp(RowByWarp[Norm]):
    def write_row(self, row: Row) -> None:
        kind, share = self.problem.kind, 1 / self.problem.width
        centre = row.reduce("sum", row.x) * share if kind == "layer" else None

        def centred(at: At) -> Value:
            value = row.x(at)
            return value if centre is None else value - centre

        def square(at: At) -> Value:
            value = centred(at)
            return value * value

        total = row.reduce("sum", square)
        if kind == "l2":
            scale = 1 / self.gpu.max(self.gpu.unary("sqrt", total), self.problem.epsilon)
        else:
            scale = 1 / self.gpu.unary("sqrt", total * share + self.problem.epsilon)
        row.store(lambda at: centred(at) * scale)


@solves(Lrn)
class LrnByWarp(RowByWarp[Lrn]):
    """A lane reads its element's neighbours once more."""

    def write_row(self, row: Row) -> None:
        lrn, f = self.problem, row.f
        before = (lrn.size - 1) // 2

        def square(index: Value) -> Value:
            inside = index.below(lrn.width)         # before the first it is beyond the last, for it is unsigned
            value = row.x_at(f.select(inside, index, index.like(0), "index"))
            return f.select(inside, value * value, value.like(0), "square")

        def normalised(at: At) -> Value:
            total = square(at.index - before)
            for k in range(1, lrn.size):
                total = total + square(at.index + (k - before))
            base = total * (lrn.alpha / lrn.size) + lrn.bias
            if lrn.beta in ROOTS:
                power: Value = ROOTS[lrn.beta](base, lambda value: row.gpu.unary("sqrt", value))
                return row.x(at) / power
            result: Value = row.x(at) * EXP(row.gpu, LOG(row.gpu, base) * -lrn.beta)
            return result

        row.store(normalised)


@solves(Reduce)
class ReduceByWarp(RowByWarp[Reduce]):
    def write_row(self, row: Row) -> None:
        row.store_one(row.reduce(self.problem.kind, row.x))
