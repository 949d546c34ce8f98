"""Elements picked one by one: vectors of indices, and a load for each."""
from __future__ import annotations

import math

from engines.backends.llvm.codegen.ir_builder import I64, Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import ELEMENTS
from engines.backends.llvm.kernels.common.access import item_addresses, offset, unravel
from engines.backends.llvm.kernels.elementwise.integers import load_integers
from engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, begin_kernel, solves
from engines.lowering.problems.movement import GatherElements

TOGETHER = 8        # elements of an unrolled turn


@solves(GatherElements)
class GatherElementsKernel(Kernel[GatherElements]):
    @property
    def rows(self) -> int:
        """Of the grid, for an item."""
        return math.prod(self.problem.y.shape[:-1])

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(self.rows)

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        f, addresses, (begin, end, *_) = begin_kernel(module, name, 3)
        steps = [self._steps(), problem.index.strides, problem.y.strides]
        for row in f.range("row", begin, end):
            at = item_addresses(addresses, (problem.x, problem.index, problem.y), row.divided(self.rows))
            places = unravel(row.remainder(self.rows), problem.y.shape[:-1])
            x, index, y = (offset(a, places, s[:-1]) for a, s in zip(at, steps, strict=True))
            for start, count in f.tiles("element", problem.y.shape[-1], TOGETHER):
                self._elements([offset(a, [start], s[-1:]) for a, s in zip((x, index, y), steps, strict=True)], count)

    def _steps(self) -> tuple[int, ...]:
        """x's strides; along the axis the index says where to go."""
        return tuple(0 if axis == self.problem.axis else stride for axis, stride in enumerate(self.problem.x.strides))

    def _elements(self, at: list[Value], count: int) -> None:
        """`count` neighbours; at: where in x, the index and y."""
        problem = self.problem
        x, index, y = at
        f, extent = x.f, problem.x.shape[problem.axis]
        places = load_integers(problem.index, index, count)
        places = f.select(places.compare("slt", 0), places + extent, places)
        places = f.select(places.below(extent), places, places.like(extent - 1))
        element = ELEMENTS[problem.x.dtype]
        for i in range(count):
            place = f.op(I64, f"extractelement {places}, i32 {i}", "place")
            source = x + place * problem.x.strides[problem.axis] + i * self._steps()[-1]
            f.store(f.load(element, source, hint="picked"), y + i * problem.y.strides[-1])
