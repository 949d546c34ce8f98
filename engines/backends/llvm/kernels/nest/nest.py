"""Kernel of general loop nests, vectorised along one loop.

    for the outer loops: accumulators = 0; for the inner loops: accumulators += term; y = result

A tactic chooses the vectorised loop, the vectors per iteration, and the neighbours along another loop that are computed
at once. The rows of the grid are blocks of the outer loops.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import item_addresses, unravel
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.codegen.nest.loops import Code, LoopState
from infer_server.engines.codegen.nest.order import NONE, Cut, Loops
from infer_server.engines.codegen.nest.results import write_element
from infer_server.engines.codegen.nest.values import NEAR
from infer_server.engines.lowering.epilogue.functions import FUNCTIONS
from infer_server.engines.lowering.problems.nest import Nest

BLOCK = 1 << 13     # iterations in a row of the grid: enough to amortise a call, few enough to share among threads
TURN = 3            # overhead of a loop iteration, in cycles
MOST_CUTS, MOST_WITHIN = 6, 3       # most tactics to time, without and with a loop inside the vectorised one


@dataclass(frozen=True)
class NestTactic(Tactic):
    """Tactic of a nest: how its loops are vectorised and tiled."""
    cut: Cut

    def __str__(self) -> str:
        cut = self.cut
        lanes = f"lanes along loop {cut.lanes}, {cut.vectors} at once" if cut.lanes != NONE else "one by one"
        lanes += f", {cut.count} of loop {cut.rows}" if cut.rows != NONE else ""
        return lanes + (f", loop {cut.within} within" if cut.within != NONE else "")


@dataclass(frozen=True)
class GridBlocks:
    """Rows of the grid: all iterations of the outer loops before `order[split]`, and blocks of that loop.

    No loop that is unrolled or vectorised around another one comes before it.
    """
    split: int
    block: int
    count: int

    @staticmethod
    def of(loops: Loops, lanes: int) -> GridBlocks:
        work = max(math.prod(loops.extents[loop] for loop in loops.inner), 1)
        several = {loops.cut.rows} | ({loops.cut.lanes} if loops.cut.within != NONE else set())
        last = next((position for position, loop in enumerate(loops.order) if loop in several), len(loops.order))
        for split in reversed(range(len(loops.order))):
            extent, step = loops.extents[loops.order[split]], loops.width(lanes, loops.order[split])
            if work * extent >= BLOCK and split <= last or not split:
                block = min(-(-max(BLOCK // work, 1) // step) * step, extent)
                return GridBlocks(split, block, -(-extent // block))
            work *= extent
        return GridBlocks(0, 1, 1)


@solves(Nest)
class NestKernel(Kernel[Nest]):
    """Kernel of loop nests."""
    def loops(self, cut: Cut) -> Loops:
        problem = self.problem
        return Loops(problem.program, problem.sources, (*problem.loops, *problem.reduced), len(problem.loops), cut)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        return (*self.problem.loops, *self.problem.reduced)

    def tactics(self, isa: Isa) -> Sequence[NestTactic]:
        along = [loop for loop, extent in enumerate(self.extents) if extent > 1]
        if chased := self.problem.program.chased:       # lanes that follow different pointers gain nothing
            depends = self.loops(Cut()).depends
            along = [loop for loop in along if not any(loop in depends[one] for one in chased)]
        if chased or not along:
            along.append(NONE)
        if self.problem.inside and any(loop >= len(self.problem.loops) for loop in along):
            along = [loop for loop in along if loop >= len(self.problem.loops)] + [
                loop for loop in along if loop < len(self.problem.loops)]
        cuts: list[Cut] = []
        within: list[Cut] = []
        for lanes in along:
            for vectors in (1, 2, 4) if lanes != NONE and self.extents[lanes] > isa.lanes else (1,):
                shared = [Cut(lanes, vectors, rows, count) for rows in self._shared_reads(lanes)
                          for count in ((4, 6) if self.extents[rows] >= 4 else (self.extents[rows],))]
                cuts += [Cut(lanes, vectors), *shared]
                within += [Cut(lanes, vectors, within=loop) for loop in self._free(lanes)]
        # Choose among each kind separately: the cost model compares the two kinds badly.
        kept = [tactic for some, most in ((cuts, MOST_CUTS), (within, MOST_WITHIN))
                for tactic in self._cheapest(isa, some)[:most]]
        return sorted(kept, key=lambda tactic: self.cost(isa, tactic))

    def _cheapest(self, isa: Isa, cuts: Iterable[Cut]) -> list[NestTactic]:
        return sorted(map(NestTactic, cuts), key=lambda tactic: self.cost(isa, tactic))

    def _shared_reads(self, lanes: int) -> list[int]:
        """Return the loops whose neighbours share some of their reads."""
        if not self.problem.reduced or self.problem.inside:
            return []
        outer = [loop for loop in range(len(self.problem.loops)) if loop != lanes and self.extents[loop] > 1]
        depends = self.loops(Cut(lanes)).depends
        reads = [depends[i] for i, one in enumerate(self.problem.program.operations) if one.op in ("read", "pick")]
        return [loop for loop in outer if 0 < sum(loop in some for some in reads) < len(reads)]

    def _free(self, lanes: int) -> list[int]:
        """Return the outer loops that some vectorised operation does not depend on."""
        if not 0 <= lanes < len(self.problem.loops):
            return []
        depends = self.loops(Cut(lanes)).depends
        made = [depends[i] for i, one in enumerate(self.problem.program.operations) if one.args and lanes in depends[i]]
        return [loop for loop in range(len(self.problem.loops)) if loop != lanes and self.extents[loop] > 1
                and any(loop not in some for some in made)]

    def cost(self, isa: Isa, tactic: NestTactic) -> float:
        loops, cut = self.loops(tactic.cut), tactic.cut
        order = (*loops.order, *loops.inner)
        trips = {loop: -(-loops.extents[loop] // loops.width(isa.lanes, loop)) for loop in order}
        turns = [1]
        for loop in order:
            turns.append(turns[-1] * trips[loop])
        total = TURN * float(sum(turns))
        for one, depends in enumerate(loops.depends):
            last = max((order.index(loop) + 1 for loop in depends), default=0)
            copies = (cut.vectors if cut.lanes in depends else 1) * (cut.count if cut.rows in depends else 1)
            total += turns[last] * copies * self._cycles(isa, loops, one)
        for view in self.problem.targets:
            near = cut.lanes >= 0 and len(view.strides) > cut.lanes and view.strides[cut.lanes] == view.size
            stores = loops.extents if self.problem.inside else loops.extents[:loops.outer]
            near &= self.problem.inside or cut.lanes < loops.outer
            total += math.prod(stores) * (1 / isa.lanes if near else 2)
        wide = max((2 for one in loops.program.operations if one.op == "reduce" and one.kind not in ("f32", "i32")),
                   default=1)
        if cut.count * cut.vectors * wide + cut.vectors + 4 > isa.registers:     # accumulators and operands spill
            total *= 2
        return total

    def _cycles(self, isa: Isa, loops: Loops, number: int) -> float:
        """Return the cycles of one operation."""
        one, cut = loops.program.operations[number], loops.cut
        wide = 2 if one.kind in ("f64", "i64", "u64") else 1
        if one.op == "read":
            stride = loops.sources[int(one.what or 0)].strides[cut.lanes] if cut.lanes != NONE else 0
            gap = abs(stride) / loops.sources[int(one.what or 0)].size
            return wide if gap <= 1 else gap + 1 if gap <= NEAR else 2 * isa.lanes
        if one.op == "pick":
            return 3 * isa.lanes if cut.lanes in loops.depends[number] else 2
        return 0.1 if one.op in ("number", "index", "item") else 12 if one.op in FUNCTIONS else wide

    def grid(self, isa: Isa, tactic: NestTactic) -> Grid:
        loops = self.loops(tactic.cut)
        blocks = GridBlocks.of(loops, isa.lanes)
        return Grid(math.prod(loops.extents[loop] for loop in loops.order[:blocks.split]) * blocks.count)

    def windows(self, isa: Isa, tactic: NestTactic) -> Sequence[Window]:
        return [Window.whole(view) for view in (*self.problem.inputs, *self.problem.outputs)]

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: NestTactic) -> None:
        problem, loops = self.problem, self.loops(tactic.cut)
        blocks, count = GridBlocks.of(loops, isa.lanes), len(problem.sources)
        f, addresses, (begin, end, *_) = begin_kernel(module, name, count + len(problem.targets))
        code = Code(f, isa, loops)
        required = problem.program.needed(problem.program.results)
        gridded = loops.order[:blocks.split]
        rows = self.grid(isa, tactic).rows_per_item
        for row in f.range("row", begin, end):
            item = row.divided(rows)
            *outer, block = unravel(row.remainder(rows), (*(loops.extents[loop] for loop in gridded), blocks.count))
            bases = item_addresses(addresses, (*problem.sources, *problem.targets), item)
            frame = LoopState(tuple(bases[:count]), tuple(bases), {-1: item})
            code.fill(frame, required)
            for loop, index in zip(gridded, outer, strict=True):
                frame = code.enter(frame, loop, index, 1, required)
            first = block * blocks.block
            bounds = None
            if loops.order and blocks.count > 1:
                extent = loops.extents[loops.order[blocks.split]]
                bounds = (first, (first + blocks.block).at_most(extent))
            code.over(frame, loops.order[blocks.split:], required,
                      lambda inside, at=bases[count:]: write_element(    # type: ignore[misc]
                          code, inside, problem, at, required),
                      None, bounds)
