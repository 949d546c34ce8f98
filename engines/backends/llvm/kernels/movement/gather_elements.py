"""Elements picked one by one: vectors of indices, and a load for each."""
from __future__ import annotations

import math
from dataclasses import replace

from engines.backends.llvm.codegen.ir_builder import I64, Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import ELEMENTS
from engines.backends.llvm.kernels.common.access import each_row, offset
from engines.backends.llvm.kernels.elementwise.integers import load_integers
from engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, begin_kernel, solves
from engines.lowering.problems.movement import GatherElements

TOGETHER = 8        # elements of an unrolled turn


@solves(GatherElements)
class GatherElementsKernel(Kernel[GatherElements]):
    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.y.shape[:-1]))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        f, addresses, (begin, end, *_) = begin_kernel(module, name, 3)
        steps = [self._steps(), problem.index.strides, problem.y.strides]
        views = (replace(problem.x, strides=steps[0]), problem.index, problem.y)
        for at in each_row(f, begin, end, addresses, views, problem.y.shape[:-1]):
            for start, count in f.tiles("element", problem.y.shape[-1], TOGETHER):
                self._elements([offset(a, [start], s[-1:]) for a, s in zip(at, steps, strict=True)], count)

    def _steps(self) -> tuple[int, ...]:
        """x's strides; along the axis the index says where to go."""
        return tuple(0 if axis == self.problem.axis else stride for axis, stride in enumerate(self.problem.x.strides))

    def _elements(self, at: list[Value], count: int) -> None:
        """`count` neighbours; at: where in x, the index and y."""
        problem, (x, index, y) = self.problem, at
        f, extent = x.f, problem.x.shape[problem.axis]
        chosen = load_integers(problem.index, index, count)
        chosen = f.select(chosen.compare("slt", 0), chosen + extent, chosen)
        chosen = f.select(chosen.below(extent), chosen, chosen.like(extent - 1))
        element = ELEMENTS[problem.x.dtype]
        for i in range(count):
            one = f.op(I64, f"extractelement {chosen}, i32 {i}", "index")
            source = x + one * problem.x.strides[problem.axis] + i * self._steps()[-1]
            f.store(f.load(element, source, hint="element"), y + i * problem.y.strides[-1])
