"""Softmax, norms, local response normalisation and reductions, each as passes over a row."""
from __future__ import annotations

from infer_server.engines.backends.cuda.kernels.kernel import solves
from infer_server.engines.backends.cuda.kernels.rows.rows import At, Row, RowByWarp
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.row_formulas import norm, response, softmax
from infer_server.engines.lowering.problems.rows import Lrn, Norm, Reduce, Softmax


@solves(Softmax)
class SoftmaxByWarp(RowByWarp[Softmax]):
    """Softmax with a warp per row."""

    def write_row(self, row: Row) -> None:
        softmax(row, self.gpu, self.problem.log)


@solves(Norm)
class NormByWarp(RowByWarp[Norm]):
    """Layer, RMS and similar norms with a warp per row."""

    def write_row(self, row: Row) -> None:
        norm(row, self.gpu, self.problem)


@solves(Lrn)
class LrnByWarp(RowByWarp[Lrn]):
    """Local response normalisation with a warp per row; a lane rereads its element's neighbours."""

    def write_row(self, row: Row) -> None:
        lrn, f = self.problem, row.f
        before = (lrn.size - 1) // 2

        def square(index: Value) -> Value:
            inside = index.below(lrn.width)         # unsigned: indices before the first wrap past the last
            value = row.x_at(f.select(inside, index, index.like(0), "index"))
            return f.select(inside, value * value, value.like(0), "square")

        def normalised(at: At) -> Value:
            total = square(at.index - before)
            for k in range(1, lrn.size):
                total = total + square(at.index + (k - before))
            return response(self.gpu, lrn, lambda: row.x(at), total)

        row.store(normalised)


@solves(Reduce)
class ReduceByWarp(RowByWarp[Reduce]):
    """Reduction with a warp per row."""

    def write_row(self, row: Row) -> None:
        row.store_one(row.reduce(self.problem.kind, row.x))
