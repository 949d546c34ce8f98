"""Order in which a kernel runs the loops of a nest, and the loops that each operation depends on."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from infer_server.engines.lowering.nest.program import NestProgram
from infer_server.engines.lowering.problems.view import View

NONE = -2       # stands for no loop (-1 is the loop over items)


@dataclass(frozen=True)
class Cut:
    """Vectorisation and tiling of the loops of a nest; NONE means that there is no such loop.

    lanes: the vectorised loop, with `vectors` vectors per iteration. rows: the outer loop that is unrolled by `count`.
    within: an outer loop that runs inside the vectorised one, so that values which do not depend on it are computed
    once.
    """
    lanes: int = NONE
    vectors: int = 1
    rows: int = NONE
    count: int = 1
    within: int = NONE


@dataclass(frozen=True)
class Loops:
    """Nest program with its operands and the tiling of its loops."""
    program: NestProgram
    sources: tuple[View, ...]
    extents: tuple[int, ...]        # outer loops first, then inner ones
    outer: int                      # number of outer loops
    cut: Cut

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Return the outer loops from the outermost to the innermost."""
        last = [loop for loop in (self.cut.rows, self.cut.lanes, self.cut.within) if 0 <= loop < self.outer]
        return (*(loop for loop in range(self.outer) if loop not in last), *last)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Return the inner loops, the vectorised one last."""
        return tuple(sorted(range(self.outer, len(self.extents)), key=lambda loop: loop == self.cut.lanes))

    @cached_property
    def depends(self) -> tuple[frozenset[int], ...]:
        """Return for each operation the loops on which it depends."""
        found: list[frozenset[int]] = []
        for one in self.program.operations:
            loops = frozenset[int]().union(*(found[arg] for arg in one.args))
            if one.op == "index":
                loops |= {int(one.what or 0)}
            elif one.op == "read":
                loops |= {loop for loop, step in enumerate(self.sources[int(one.what or 0)].strides) if step}
            elif one.op == "reduce":
                loops -= set(self.inner)
            elif one.op == "phi":
                loops |= self._cycle_loops(int(one.what or 0))
            found.append(loops)
        return tuple(found)

    def _cycle_loops(self, cycle: int) -> frozenset[int]:
        """Return the loops that any operation of a cycle depends on: the cycle is one loop inside all of them."""
        program = self.program
        parts = [program.operations[one] for one in program.needed(program.cycles[cycle].exits)]
        read = {loop for one in parts if one.op == "read"
                for loop, step in enumerate(self.sources[int(one.what or 0)].strides) if step}
        return frozenset(read | {int(one.what or 0) for one in parts if one.op == "index"})

    @cached_property
    def phases(self) -> tuple[int, ...]:
        """Return for each operation how many passes over the inner loops must end before it can be computed."""
        found: list[int] = []
        for one in self.program.operations:
            args = one.args
            if one.op == "phi":         # a cycle is emitted after all reductions that its step reads
                args = tuple(arg for arg in self.program.needed(self.program.cycles[int(one.what or 0)].exits)
                             if arg < len(found))
            found.append(max((found[arg] for arg in args), default=0) + (one.op == "reduce"))
        return tuple(found)

    def width(self, lanes: int, loop: int) -> int:
        """Return how many indices of a loop one iteration covers."""
        return lanes * self.cut.vectors if loop == self.cut.lanes else self.cut.count if loop == self.cut.rows else 1
