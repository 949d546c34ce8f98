"""Cumulative sums and products along an axis: one thread per line, rounding in the order of the reference."""
from __future__ import annotations

import math

from infer_server.engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special_register
from infer_server.engines.backends.cuda.kernels.access import pixel_offset
from infer_server.engines.backends.cuda.kernels.elementwise.threads import THREADS
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.nest.values import COMBINED, identity, load, store
from infer_server.engines.codegen.types import I64
from infer_server.engines.lowering.nest.program import KINDS
from infer_server.engines.lowering.problems.elementwise import CumulativeSum
from infer_server.engines.lowering.problems.view import View


@solves(CumulativeSum)
class CumulativeByThreads(GpuKernel[CumulativeSum]):
    """Kernel with one thread per line."""

    def grid(self, tactic: Tactic) -> Grid:
        shape = self.problem.y.shape
        return Grid(math.prod(shape) // shape[self.problem.axis], THREADS, THREADS)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem, axis = self.problem, self.problem.axis
        f, (x, y), rows = begin_kernel(module, name, THREADS, 2)
        thread = special_register(f, "ctaid.x") * THREADS + special_register(f, "tid.x")
        with f.when(thread.below(rows)):
            source, target = (address + self._line(view, thread)
                              for view, address in ((problem.x, x), (problem.y, y)))
            how, kind = "product" if problem.product else "sum", KINDS[problem.x.dtype]
            extent, total = problem.y.shape[axis], {how: identity(self.gpu, how, kind, x)}
            for turn in f.loop("element", extent, total=total):
                i = f.constant(extent - 1, I64) - turn if problem.reverse else turn
                value = load(self.gpu, problem.x.dtype, source + i * problem.x.strides[axis], 0, 1)
                before, total[how] = total[how], COMBINED[how](kind, total[how], value)
                found = before if problem.exclusive else total[how]
                store(self.gpu, problem.y.dtype, found, target + i * problem.y.strides[axis], 0, 1)

    def _line(self, view: View, line: Value) -> Value:
        """Return the byte offset of the line-th line, counting over all items."""
        shape, strides = (tuple(n for i, n in enumerate(numbers) if i != self.problem.axis)
                          for numbers in (view.shape, view.strides))
        return pixel_offset(line, shape, strides, view.item)
