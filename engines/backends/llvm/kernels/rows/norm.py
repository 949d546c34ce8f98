"""Norms along the innermost axis: layer, RMS, L2."""
from __future__ import annotations

from engines.backends.llvm.codegen.ir_builder import Value
from engines.backends.llvm.kernels.kernel import solves
from engines.backends.llvm.kernels.rows.passes import At, Row, RowKernel
from engines.lowering.problems.rows import Norm


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
