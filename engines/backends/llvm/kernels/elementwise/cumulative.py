"""Cumulative sums and products along an axis.

    for o: for vector of j: for i: sum += x[n, o, i, j]             few neighbours
    for o: for i: for vectors of j: y[i, j] = y[i - 1, j] + x[i, j]     many: memory is read and written in order
"""
from __future__ import annotations

import math
from functools import cached_property

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import each_row
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, begin_kernel, solves
from infer_server.engines.codegen.ir_builder import Module, Value
from infer_server.engines.codegen.nest.values import COMBINED, identity, load, store
from infer_server.engines.lowering.nest.program import KINDS
from infer_server.engines.lowering.problems.elementwise import CumulativeSum
from infer_server.engines.lowering.problems.view import View, joined

VECTORS = 4         # vectors of neighbours above which sums are computed row by row


@solves(CumulativeSum)
class CumulativeSumKernel(Kernel[CumulativeSum]):
    """Kernel of CumSum and CumProd."""
    @cached_property
    def other_axes(self) -> tuple[View, ...]:
        """Return x and y without the axis."""
        def rest(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return numbers[:self.problem.axis] + numbers[self.problem.axis + 1:]
        views = (self.problem.x, self.problem.y)
        return joined([View(v.dtype, rest(v.shape), rest(v.strides), v.item) for v in views], keep_last=False)

    @property
    def outer(self) -> tuple[int, ...]:
        """Return the extents of `other_axes` without the innermost axis if that is contiguous in both."""
        shape = self.other_axes[0].shape
        return shape[:-1] if all(v.strides[-1] == v.size for v in self.other_axes) else shape

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.outer))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, 2)
        run = math.prod(self.other_axes[0].shape) // math.prod(self.outer)
        by_rows = run > VECTORS * isa.lanes and not self.problem.exclusive
        for x, y in each_row(f, begin, end, addresses, self.other_axes, self.outer):
            if by_rows:
                self._rows(isa, x, y, run)
                continue
            for start, count in f.tiles("element", run, isa.lanes):
                self._sums(isa, x + start * self.problem.x.size, y + start * self.problem.y.size, count)

    def _ends(self, x: Value, y: Value) -> tuple[Value, Value, tuple[int, int]]:
        """Return the addresses where x and y begin, and their byte steps along the axis."""
        axis, extent, away = self.problem.axis, self.problem.x.shape[self.problem.axis], self.problem.reverse
        steps = self.problem.x.strides[axis], self.problem.y.strides[axis]
        if away:
            return x + (extent - 1) * steps[0], y + (extent - 1) * steps[1], (-steps[0], -steps[1])
        return x, y, steps

    def _rows(self, isa: Isa, x: Value, y: Value, run: int) -> None:
        """Compute each row of neighbours as the row before combined with x's."""
        f, size, dtype = x.f, self.problem.x.size, self.problem.x.dtype
        how, kind = "product" if self.problem.product else "sum", KINDS[dtype]
        x, y, steps = self._ends(x, y)

        def row(at: Value, to: Value, before: Value | None) -> None:
            for start, count in f.tiles("element", run, VECTORS * isa.lanes):
                for first in range(0, count, isa.lanes):
                    lanes, step = min(isa.lanes, count - first), start * size + first * size
                    value = load(isa, dtype, at + step, size, lanes)
                    if before is not None:
                        value = COMBINED[how](kind, load(isa, dtype, before + step, size, lanes), value)
                    store(isa, dtype, value, to + step, size, lanes)

        row(x, y, None)
        for i in f.loop("index", self.problem.x.shape[self.problem.axis] - 1):
            before = y + i * steps[1]
            row(x + (i + 1) * steps[0], before + steps[1], before)

    def _sums(self, isa: Isa, x: Value, y: Value, count: int) -> None:
        """Compute the sums along the axis for `count` neighbours."""
        problem = self.problem
        f, extent, size, dtype = x.f, problem.x.shape[problem.axis], problem.x.size, problem.x.dtype
        x, y, steps = self._ends(x, y)
        how, kind = "product" if problem.product else "sum", KINDS[dtype]
        acc = {"sum": identity(isa, how, kind, x)}
        for i in f.loop("index", extent, acc=acc):
            before = acc["sum"]
            acc["sum"] = COMBINED[how](kind, before, load(isa, dtype, x + i * steps[0], size, count))
            store(isa, dtype, before if problem.exclusive else acc["sum"], y + i * steps[1], size, count)
