"""Loop nests: one thread, a warp or a block per element of the outer loops.

    threads of an element: outer indices; for each pass: for the inner loops: accumulators += term; y = result

With one thread, neighbouring threads are neighbours along the innermost outer loop. A warp or a block per element suits
long inner loops: its threads are neighbours along an inner loop (together.py).
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special_register, wide
from infer_server.engines.backends.cuda.cost import ISSUE, LAUNCH, THREADS, Card
from infer_server.engines.backends.cuda.kernels.elementwise.threads import THREADS as BLOCK
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from infer_server.engines.backends.cuda.kernels.nest.together import SLOT, CodeTogether, Share
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.nest.loops import Code, LoopState
from infer_server.engines.codegen.nest.order import Cut, Loops
from infer_server.engines.codegen.nest.results import store_results, write_element
from infer_server.engines.lowering.nest.program import ITEM
from infer_server.engines.lowering.problems.nest import Nest
from infer_server.engines.lowering.problems.view import View

SEVERAL = (32, 512)             # threads per element other than one
FEW = 8                         # at most this many threads share one iteration of the inner loops
WAIT, SECTOR = 30, 32           # overhead of an iteration in cycles; bytes of a memory transaction
EXCHANGE = 100                  # cycles of a warp reduction


@dataclass(frozen=True)
class Sharers(Tactic):
    """Tactic: the number of threads per element."""
    threads: int = 1

    def __str__(self) -> str:
        return f"{self.threads} threads an element" if self.threads > 1 else "a thread an element"


@solves(Nest)
class NestByThreads(GpuKernel[Nest]):
    """Kernel for nests with dense results."""

    def tactics(self) -> Sequence[Sharers]:
        turns = math.prod(self.problem.reduced)
        return [Sharers(), *(Sharers(threads) for threads in SEVERAL if FEW * turns >= threads)]

    def grid(self, tactic: Sharers) -> Grid:
        elements = math.prod(self.problem.loops)
        if tactic.threads == 1:
            return Grid(elements, BLOCK, BLOCK)
        step = max(BLOCK // tactic.threads, 1)
        return Grid(elements, step, step * tactic.threads, shared_bytes=self._warps(tactic) // 2 * 2 * SLOT)

    @staticmethod
    def _warps(tactic: Sharers) -> int:
        """Return the warps per element, or 0 if one warp or less."""
        return tactic.threads // WARP if tactic.threads > WARP else 0

    # ---- cost
    def shared_loops(self, tactic: Sharers) -> dict[int, int]:
        """Map inner loops to the threads that share their iterations.

        The loop with the best-coalesced reads takes the lanes; another one takes the warps if it is long enough.
        """
        problem, first = self.problem, len(self.problem.loops)
        if tactic.threads == 1:
            return {}
        inner = range(first, first + len(problem.reduced))
        extents = dict(zip(inner, problem.reduced, strict=True))
        along = max(inner, key=lambda loop: (min(extents[loop], WARP), -self._read(loop), loop))
        others = [loop for loop in inner if loop != along and extents[loop] >= tactic.threads // WARP]
        if extents[along] >= tactic.threads or not others:
            return {along: tactic.threads}
        return {along: WARP, max(others, key=extents.__getitem__): tactic.threads // WARP}

    def _read(self, loop: int) -> int:
        """Return the bytes read per iteration from all sources, with neighbouring threads along the loop."""
        return sum(_brought(view, view.strides[loop]) for view in self._reads())

    def _reads(self) -> list[View]:
        program = self.problem.program
        read = [int(one.what or 0) for one in program.operations if one.op == "read"]
        return [self.problem.sources[number] for number in dict.fromkeys(read)]

    def cost(self, tactic: Sharers, card: Card, items: int) -> float:
        problem, sharing = self.problem, self.shared_loops(tactic)
        elements, turns = items * math.prod(problem.loops), math.prod(problem.reduced)
        extents = (*problem.loops, *problem.reduced)
        mine = turns
        for loop, threads in sharing.items():
            mine = mine // extents[loop] * -(-extents[loop] // threads)
        program = problem.program
        passes = sum(one.op == "reduce" for one in program.operations)
        picks = sum(one.op == "pick" for one in program.operations)
        along = max(sharing, key=lambda loop: sharing[loop], default=len(problem.loops) - 1)
        moved = elements * turns * ((self._read(along) if along >= 0 else SECTOR) + picks * SECTOR)
        rows, _ = self.grid(tactic).blocks(items)
        exchanged = EXCHANGE * passes * (bool(sharing) + self._warps(tactic) / 8) * -(-rows // card.multiprocessors)
        seconds = by_turns(card, mine, len(program.operations), rows * self.grid(tactic).threads)
        return max(card.copy_seconds(problem.bytes * items), moved / card.l2 + LAUNCH, seconds + exchanged / card.hertz)

    # ---- code
    def emit(self, module: GpuModule, name: str, tactic: Sharers) -> None:
        problem, outer = self.problem, self.problem.loops
        views, grid = (*problem.sources, *problem.targets), self.grid(tactic)
        f, addresses, rows = begin_kernel(module, name, grid.threads, len(views))
        loops = Loops(problem.program, problem.sources, (*outer, *problem.reduced), len(outer), Cut())
        thread = special_register(f, "tid.x")
        code = self._code(f, loops, tactic, thread)
        row = special_register(f, "ctaid.x") * grid.row_step + thread.divided(tactic.threads)
        wanted = problem.program.needed(problem.program.results)
        with f.when(row.below(rows)):           # uniform among the threads of an element
            item, indices = unravelled(row, outer)
            bases = [address + item * view.item for address, view in zip(addresses, views, strict=True)]
            split = len(problem.sources)
            frame = LoopState(tuple(bases[:split]), tuple(bases), {ITEM: item})
            code.fill(frame, wanted)
            for loop, index in enumerate(indices):
                frame = code.enter(frame, loop, index, 1, wanted)
            if tactic.threads == 1 or problem.inside:
                write_element(code, frame, problem, bases[split:], wanted)
                return
            frame = code.reduced(frame, wanted)
            with f.when((thread & tactic.threads - 1).compare("eq", 0)):
                store_results(code, frame, problem, bases[split:])

    def _code(self, f: Function, loops: Loops, tactic: Sharers, thread: Value) -> Code:
        if tactic.threads == 1:
            return Code(f, self.gpu, loops)
        return CodeTogether(f, self.gpu, loops, _shares(self.shared_loops(tactic), thread), self._warps(tactic), thread)


def by_turns(card: Card, turns: int, operations: int, threads: int) -> float:
    """Return the seconds of a launch whose threads run `turns` iterations of `operations` operations each."""
    busy = turns * threads * operations / ISSUE / card.multiprocessors
    waits = max(threads / (THREADS * card.multiprocessors), 1) * turns * (WAIT + operations)
    return max(busy, waits) / card.hertz + LAUNCH


def _shares(threads: Mapping[int, int], thread: Value) -> dict[int, Share]:
    """Return each loop's share of iterations; the first loop has the lowest bits of the thread's number."""
    shares, rest = {}, thread
    for loop, count in threads.items():
        shares[loop] = Share(wide(rest & count - 1), count)
        rest = rest.divided(count)
    return shares


def _brought(view: View, stride: int) -> int:
    """Return the bytes of memory traffic per thread for neighbouring threads that read `stride` bytes apart."""
    return min(max(abs(stride), 0), SECTOR) if stride else 1


def unravelled(number: Value, shape: Sequence[int]) -> tuple[Value, list[Value]]:
    """Return the item and the indices (i64) of an element, given its row-major number (i32) over all items."""
    indices: list[Value] = []
    for extent in reversed(shape):
        indices.insert(0, wide(number.remainder(extent)))
        number = number.divided(extent)
    return wide(number), indices
