"""In which order a kernel runs the loops of a nest, and on which of them each operation depends."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engines.lowering.nest.program import NestProgram
from engines.lowering.problems.view import View

NONE = -2       # no loop: neither one of the nest's nor the items


@dataclass(frozen=True)
class Cut:
    """How loops are cut. lanes: the loop along which vectors lie, `vectors` of them at once; rows: the outer loop of
    which `count` neighbours are computed at once; within: an outer loop that runs inside the one with lanes, for which
    what does not depend on it is computed once. NONE: there is no such loop."""
    lanes: int = NONE
    vectors: int = 1
    rows: int = NONE
    count: int = 1
    within: int = NONE


@dataclass(frozen=True)
class Loops:
    """A program, what it reads, and its loops under a cut."""
    program: NestProgram
    sources: tuple[View, ...]
    extents: tuple[int, ...]        # of the outer loops, then of the inner ones
    outer: int                      # how many are outer
    cut: Cut

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The outer loops, from without to within."""
        last = [loop for loop in (self.cut.rows, self.cut.lanes, self.cut.within) if 0 <= loop < self.outer]
        return (*(loop for loop in range(self.outer) if loop not in last), *last)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        return tuple(sorted(range(self.outer, len(self.extents)), key=lambda loop: loop == self.cut.lanes))

    @cached_property
    def depends(self) -> tuple[frozenset[int], ...]:
        """The loops on which each operation depends."""
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
        """Return the loops that any operation of a cycle depends on: it is written as one piece, inside all of them."""
        program = self.program
        parts = [program.operations[one] for one in program.needed(program.cycles[cycle].exits)]
        read = {loop for one in parts if one.op == "read"
                for loop, step in enumerate(self.sources[int(one.what or 0)].strides) if step}
        return frozenset(read | {int(one.what or 0) for one in parts if one.op == "index"})

    @cached_property
    def phases(self) -> tuple[int, ...]:
        """How many passes over the inner loops must have ended before each operation."""
        found: list[int] = []
        for one in self.program.operations:
            args = one.args
            if one.op == "phi":         # a cycle is written after all reductions that its step reads
                args = tuple(arg for arg in self.program.needed(self.program.cycles[int(one.what or 0)].exits)
                             if arg < len(found))
            found.append(max((found[arg] for arg in args), default=0) + (one.op == "reduce"))
        return tuple(found)

    def width(self, lanes: int, loop: int) -> int:
        """How many turns of a loop are taken at once."""
        return lanes * self.cut.vectors if loop == self.cut.lanes else self.cut.count if loop == self.cut.rows else 1
