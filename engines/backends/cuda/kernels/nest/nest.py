"""Nests of any loops: a thread for each element of the outer loops, which goes through the inner ones.

    thread: its outer indices; for each pass: for the inner loops: accumulators += term; y = result

Neighbours along the innermost outer loop are neighbouring threads. A reduction of a whole tensor to a few elements is
right, and slow: nothing shares it out.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special, wide
from engines.backends.cuda.kernels.elementwise.threads import THREADS
from engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from engines.codegen.ir_builder import Value
from engines.codegen.nest.loops import Code, Frame
from engines.codegen.nest.order import Cut, Loops
from engines.codegen.nest.results import write_element
from engines.lowering.nest.program import ITEM
from engines.lowering.problems.nest import Nest


@solves(Nest)
class NestByThreads(GpuKernel[Nest]):
    def grid(self, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.loops), THREADS, THREADS)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem, outer = self.problem, self.problem.loops
        views = (*problem.sources, *problem.targets)
        f, addresses, rows = begin_kernel(module, name, THREADS, len(views))
        loops = Loops(problem.program, problem.sources, (*outer, *problem.reduced), len(outer), Cut())
        code, wanted = Code(f, self.gpu, loops), problem.program.needed(problem.program.results)
        thread = special(f, "ctaid.x") * THREADS + special(f, "tid.x")
        with f.when(thread.below(rows)):
            item, indices = unravelled(thread, outer)
            bases = [address + item * view.item for address, view in zip(addresses, views, strict=True)]
            split = len(problem.sources)
            frame = Frame(tuple(bases[:split]), tuple(bases), {ITEM: item})
            code.fill(frame, wanted)
            for loop, index in enumerate(indices):
                frame = code.enter(frame, loop, index, 1, wanted)
            write_element(code, frame, problem, bases[split:], wanted)


def unravelled(number: Value, shape: Sequence[int]) -> tuple[Value, list[Value]]:
    """The item and the indices of an element among those of all items (an i32), in row-major order; each an i64."""
    indices: list[Value] = []
    for extent in reversed(shape):
        indices.insert(0, wide(number.remainder(extent)))
        number = number.divided(extent)
    return wide(number), indices
