"""Cumulative sums along an axis: a thread for each line, in order, so that sums round as the reference's do."""
from __future__ import annotations

import math

from engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special
from engines.backends.cuda.kernels.access import ELEMENTS, pixel_offset
from engines.backends.cuda.kernels.elementwise.threads import THREADS
from engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from engines.codegen.ir_builder import Value
from engines.codegen.types import I64
from engines.lowering.problems.elementwise import CumulativeSum
from engines.lowering.problems.view import View


@solves(CumulativeSum)
class CumulativeByThreads(GpuKernel[CumulativeSum]):
    def grid(self, tactic: Tactic) -> Grid:
        shape = self.problem.y.shape
        return Grid(math.prod(shape) // shape[self.problem.axis], THREADS, THREADS)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem, axis = self.problem, self.problem.axis
        f, (x, y), rows = begin_kernel(module, name, THREADS, 2)
        thread = special(f, "ctaid.x") * THREADS + special(f, "tid.x")
        with f.when(thread.below(rows)):
            source, target = (address + self._line(view, thread)
                              for view, address in ((problem.x, x), (problem.y, y)))
            extent, element = problem.y.shape[axis], ELEMENTS[problem.x.dtype]
            total = {"sum": f.constant(0, element)}
            for turn in f.loop("element", extent, total=total):
                i = f.constant(extent - 1, I64) - turn if problem.reverse else turn
                before = total["sum"]
                total["sum"] = before + f.load(element, source + i * problem.x.strides[axis], problem.x.size, "element")
                f.store(before if problem.exclusive else total["sum"], target + i * problem.y.strides[axis],
                        problem.y.size)

    def _line(self, view: View, line: Value) -> Value:
        """Bytes to the first element of the line-th of all items."""
        shape, strides = (tuple(n for i, n in enumerate(numbers) if i != self.problem.axis)
                          for numbers in (view.shape, view.strides))
        return pixel_offset(line, shape, strides, view.item)
