"""Cumulative sums and products along an axis.

    for o: for vector of j: for i: sum += x[n, o, i, j]
"""
from __future__ import annotations

import math
from functools import cached_property

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.common.access import each_row
from engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, begin_kernel, solves
from engines.backends.llvm.kernels.nest.vectors import COMBINED, identity, load, store
from engines.codegen.ir_builder import Module, Value
from engines.lowering.nest.program import KINDS
from engines.lowering.problems.elementwise import CumulativeSum
from engines.lowering.problems.view import View, joined


@solves(CumulativeSum)
class CumulativeSumKernel(Kernel[CumulativeSum]):
    @cached_property
    def beside(self) -> tuple[View, ...]:
        """x and y without the axis."""
        def rest(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return numbers[:self.problem.axis] + numbers[self.problem.axis + 1:]
        views = (self.problem.x, self.problem.y)
        return joined([View(v.dtype, rest(v.shape), rest(v.strides), v.item) for v in views], keep_last=False)

    @property
    def outer(self) -> tuple[int, ...]:
        """The extents of `beside` that are no run of neighbours in both."""
        shape = self.beside[0].shape
        return shape[:-1] if all(v.strides[-1] == v.size for v in self.beside) else shape

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.outer))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, 2)
        run = math.prod(self.beside[0].shape) // math.prod(self.outer)
        for x, y in each_row(f, begin, end, addresses, self.beside, self.outer):
            for start, count in f.tiles("element", run, isa.lanes):
                self._sums(isa, x + start * self.problem.x.size, y + start * self.problem.y.size, count)

    def _sums(self, isa: Isa, x: Value, y: Value, count: int) -> None:
        """Down the axis, for `count` neighbours."""
        problem = self.problem
        f, extent, size, dtype = x.f, problem.x.shape[problem.axis], problem.x.size, problem.x.dtype
        steps = [view.strides[problem.axis] * (-1 if problem.reverse else 1) for view in (problem.x, problem.y)]
        if problem.reverse:
            x, y = (a + (extent - 1) * -step for a, step in zip((x, y), steps, strict=True))
        how, kind = "product" if problem.product else "sum", KINDS[dtype]
        acc = {"sum": identity(isa, how, kind, x)}
        for i in f.loop("index", extent, acc=acc):
            before = acc["sum"]
            acc["sum"] = COMBINED[how](kind, before, load(isa, dtype, x + i * steps[0], size, count))
            store(isa, dtype, before if problem.exclusive else acc["sum"], y + i * steps[1], size, count)
