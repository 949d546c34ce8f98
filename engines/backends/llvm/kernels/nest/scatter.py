"""Kernel of scatters: a row of the grid copies its part of x, then applies all updates of that part in order.

    y = x; for the loops: y[place] = y[place] and value, combined

A loop is *independent* if its index is an index of y, over all of its extent: different iterations update different
elements. Its iterations are rows of the grid, unless it is the vectorised one.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import item_addresses, offset, unravel
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from infer_server.engines.codegen.ir_builder import Module, Value
from infer_server.engines.codegen.nest.loops import Code, LoopState
from infer_server.engines.codegen.nest.order import NONE, Cut, Loops
from infer_server.engines.codegen.nest.results import independent_loops, update
from infer_server.engines.codegen.nest.values import load, store
from infer_server.engines.lowering.problems.nest import Scatter, Update


@solves(Scatter)
class ScatterKernel(Kernel[Scatter]):
    """Kernel of scatters."""
    @cached_property
    def independent_loops(self) -> dict[int, int]:
        return independent_loops(self.problem)

    @cached_property
    def lanes(self) -> int:
        """Return the vectorised loop, an independent one that is contiguous in y, or NONE."""
        y = self.problem.y
        near = [loop for loop, axis in self.independent_loops.items()
                if y.strides[axis] == y.size and y.shape[axis] > 1]
        return near[0] if near else NONE

    @cached_property
    def rows(self) -> list[int]:
        """Return the loops whose iterations are rows of the grid."""
        return [loop for loop in self.independent_loops if loop != self.lanes]

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.loops[loop] for loop in self.rows))

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        return [Window.whole(view) for view in (*self.problem.inputs, *self.problem.outputs)]

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        views = (*problem.sources, problem.y)
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(views))
        loops = Loops(problem.program, problem.sources, problem.loops, len(problem.loops), Cut(self.lanes))
        code, required = Code(f, isa, loops), problem.program.needed(problem.program.results)
        count = self.grid(isa, tactic).rows_per_item
        for row in f.range("row", begin, end):
            item = row.divided(count)
            *sources, y = item_addresses(addresses, views, item)
            indices = unravel(row.remainder(count), [problem.loops[loop] for loop in self.rows])
            self._copy(code, sources[0], y, indices)
            frame = LoopState(tuple(sources), tuple(sources), {-1: item})
            code.fill(frame, required)
            for loop, index in zip(self.rows, indices, strict=True):
                frame = code.enter(frame, loop, index, 1, required)
            rest = [loop for loop in loops.order if loop not in self.rows]
            code.over(frame, rest, required, lambda inside, y=y: update(code, inside, problem, y))  # type: ignore[misc]

    def _copy(self, code: Code, x: Value, y: Value, indices: Sequence[Value]) -> None:
        """Copy the part of x that belongs to this row of the grid."""
        source, target = self.problem.sources[0], self.problem.y
        fixed = [self.independent_loops[loop] for loop in self.rows]
        for axis, index in zip(fixed, indices, strict=True):
            x, y = (offset(address, [index], [view.strides[axis]]) for address, view in ((x, source), (y, target)))
        free = [axis for axis in range(len(target.shape)) if axis not in fixed]
        self._copy_axes(code, x, y, free)

    def _copy_axes(self, code: Code, x: Value, y: Value, axes: list[int]) -> None:
        source, target = self.problem.sources[0], self.problem.y
        if len(axes) > 1:
            axis, *rest = axes
            for i in code.f.loop("axis", target.shape[axis]):
                self._copy_axes(code, x + i * source.strides[axis], y + i * target.strides[axis], rest)
            return
        axis = axes[0] if axes else -1
        extent = target.shape[axis] if axes else 1
        steps = [view.strides[axis] if axes else view.size for view in (source, target)]
        for start, count in code.f.tiles("element", extent, code.machine.lanes, split_tail=True):
            at = [address + start * step for address, step in zip((x, y), steps, strict=True)]
            step = steps[0] if steps[0] or count == 1 else 0
            value = load(code.machine, source.dtype, at[0], step, count)
            store(code.machine, target.dtype, value, at[1], steps[1], count)


@solves(Update)
class UpdateKernel(ScatterKernel):
    """Kernel of scatters whose data are in place."""

    def _copy(self, code: Code, x: Value, y: Value, indices: Sequence[Value]) -> None:
        """Copy nothing."""
