"""Scatters: a thread copies its elements of x, then applies in order all updates that may hit them.

    thread: y = x for its elements; for the loops: if y[place] is its own: y[place] = combine(y[place], value)

Loops whose iterations never hit the same element (engines/codegen/nest/results.py) divide y into parts. If there are
few, several threads share a part, and each evaluates the target of every update of the part.
"""
from __future__ import annotations

import math
from functools import cached_property

from infer_server.engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special_register
from infer_server.engines.backends.cuda.cost import Card
from infer_server.engines.backends.cuda.kernels.access import pixel_offset
from infer_server.engines.backends.cuda.kernels.elementwise.threads import THREADS
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from infer_server.engines.backends.cuda.kernels.nest.nest import by_turns, unravelled
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.nest.loops import Code, LoopState
from infer_server.engines.codegen.nest.order import Cut, Loops
from infer_server.engines.codegen.nest.results import independent_loops, update
from infer_server.engines.codegen.types import I32, I64
from infer_server.engines.lowering.nest.program import ITEM
from infer_server.engines.lowering.problems.nest import Scatter

ENOUGH = 1 << 10        # threads per item that are worth using


@solves(Scatter)
class ScatterByThreads(GpuKernel[Scatter]):
    """Kernel with one or several threads per part of y."""

    @cached_property
    def independent_loops(self) -> dict[int, int]:
        return independent_loops(self.problem)

    @property
    def parts(self) -> list[int]:
        """Extents of the loops that divide y into parts."""
        return [self.problem.loops[loop] for loop in self.independent_loops]

    @cached_property
    def free(self) -> list[int]:
        """Axes of y within a part."""
        return [axis for axis in range(len(self.problem.y.shape)) if axis not in self.independent_loops.values()]

    @cached_property
    def shape(self) -> list[int]:
        """Shape of a part."""
        return [self.problem.y.shape[axis] for axis in self.free]

    @cached_property
    def sharers(self) -> int:
        """Threads per part; each owns every sharers-th element."""
        return min(math.prod(self.shape), max(ENOUGH // math.prod(self.parts), 1))

    def grid(self, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.parts) * self.sharers, THREADS, THREADS)

    def cost(self, tactic: Tactic, card: Card, items: int) -> float:
        """Estimate a launch whose threads run all updates of their part in sequence."""
        problem, threads = self.problem, items * math.prod(self.parts) * self.sharers
        turns = math.prod(problem.loops) // math.prod(self.parts)
        return max(card.copy_seconds(problem.bytes * items),
                   by_turns(card, turns, len(problem.program.operations), threads))

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem = self.problem
        views = (*problem.sources, problem.y)
        f, addresses, rows = begin_kernel(module, name, THREADS, len(views))
        thread = special_register(f, "ctaid.x") * THREADS + special_register(f, "tid.x")
        with f.when(thread.below(rows)):
            item, (*indices, mine) = unravelled(thread, [*self.parts, self.sharers])
            *sources, y = (address + item * view.item for address, view in zip(addresses, views, strict=True))
            along = dict(zip(self.independent_loops, indices, strict=True))
            self._copy(f, sources[0], y, along, mine)
            loops = Loops(problem.program, problem.sources, problem.loops, len(problem.loops), Cut())
            code, wanted = Code(f, self.gpu, loops), problem.program.needed(problem.program.results)
            frame = LoopState(tuple(sources), tuple(sources), {ITEM: item})
            code.fill(frame, wanted)
            for loop, index in along.items():
                frame = code.enter(frame, loop, index, 1, wanted)
            rest = [loop for loop in loops.order if loop not in along]
            code.over(frame, rest, wanted, lambda inside: self._update(code, inside, y, mine))

    def _copy(self, f: Function, x: Value, y: Value, along: dict[int, Value], mine: Value) -> None:
        """Copy the thread's elements of x."""
        source, target = self.problem.sources[0], self.problem.y
        for loop, index in along.items():
            axis = self.independent_loops[loop]
            x, y = x + index * source.strides[axis], y + index * target.strides[axis]
        for i in f.range("element", mine, f.constant(math.prod(self.shape), I64), self.sharers):
            number = f.cast("trunc", i, I32, "number")
            here, there = (address + pixel_offset(number, self.shape, [view.strides[axis] for axis in self.free], 0)
                           for address, view in ((x, source), (y, target)))
            f.store(f.load(f"i{8 * target.size}", here, target.size, "element"), there, target.size)

    def _update(self, code: Code, frame: LoopState, y: Value, mine: Value) -> None:
        if self.sharers == 1:
            update(code, frame, self.problem, y)
            return
        number = mine.like(0)
        for axis, extent in zip(self.free, self.shape, strict=True):
            place = code.value_at(frame, self.problem.program.results[1 + axis], (0, 0))
            assert isinstance(place, Value), "an index of lanes, where there are none"
            number = number * extent + place
        with code.f.when(number.remainder(self.sharers).compare("eq", mine)):
            update(code, frame, self.problem, y)
