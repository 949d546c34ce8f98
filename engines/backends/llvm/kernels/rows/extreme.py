"""Greatest or least element of a whole batch: one thread reads all rows of all items, and stores once."""
from __future__ import annotations

import math
from dataclasses import replace

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import item_addresses, offset, unravel
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Tactic, begin_kernel, solves
from infer_server.engines.backends.llvm.kernels.rows.passes import OverRows, RowCode, combine
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.problems.rows import NEUTRAL, Extreme
from infer_server.engines.lowering.problems.view import joined

UNCUT = 1 << 40         # row step that keeps the grid from being split


@solves(Extreme)
class ExtremeKernel(OverRows[Extreme]):
    """Kernel of the extreme of a whole batch."""
    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return replace(super().grid(isa, tactic), row_step=UNCUT)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(problem.sources) + 3)
        *inputs, prologue, program, y = addresses
        views = joined(problem.sources, keep_last=True)
        outer = views[0].shape[:-1]
        best = {0: f.constant(NEUTRAL[problem.kind], isa.floats)}
        for number in f.range("row", begin, end, best=best):
            items = item_addresses(inputs, views, number.divided(math.prod(outer)))
            indices = unravel(number.remainder(math.prod(outer)), outer)
            sources = [offset(a, indices, view.strides[:-1]) for a, view in zip(items, views, strict=True)]
            row = RowCode(f, isa, problem, sources, prologue, [], program, y, None)
            best[0] = combine(isa, problem.kind, best[0], row.reduce(problem.kind, row.x))
        RowCode(f, isa, problem, [], prologue, [], program, y, None).store_one(best[0])
