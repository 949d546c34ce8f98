"""Recurrent cells from step to step: a block for each item and direction, which goes through all of its steps.

    for t in time: for stage of the cell:
      sum[gate] = sum over k of state[k] * R[gate, k, unit]      the state from shared memory (weights.py)
      for update in stage.updates: state[slot] = program(...)    in registers (steps.py)
    h goes to y

Where the weights of a direction fit into the registers and the shared memory of a block they are read once; else,
through the caches, in every step.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engines.backends.cuda.codegen.gpu import WARP
from engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special
from engines.backends.cuda.cost import ISSUE, LAUNCH, PLAIN, REGISTERS, SHARED_RATE, THREADS, Card
from engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from engines.backends.cuda.kernels.recurrent.steps import Direction, Rows
from engines.backends.cuda.kernels.recurrent.weights import PIECE, Kept, Pieces, threads_of
from engines.lowering.problems.problem import Array
from engines.lowering.problems.recurrence import Recurrence

MOST_UNITS = 1024       # threads of a block
PARTS = (8, 4, 16, 2, 1)
BESIDE, MOST = 72, 248  # registers of a thread beside its weights; of a thread
FOUR_WARPS = 4 * WARP   # of which registers are given to as many threads
UPDATE = 80             # instructions of a thread and step beside its products
WAIT = 500              # cycles of a step in which nothing is issued: states in shared memory, exchanges, the update
SERIAL = 2              # cycles from one instruction of a thread to the next


@solves(Recurrence)
class RecurrenceByBlock(GpuKernel[Recurrence]):
    @property
    def refusal(self) -> str:
        return "" if self.problem.hidden <= MOST_UNITS else f"a recurrent layer of more than {MOST_UNITS} units"

    @property
    def directions(self) -> int:
        return len(self.problem.cells)

    def tactics(self) -> Sequence[Tactic]:
        return [*filter(None, map(self._kept, PARTS)), Tactic()]

    def _kept(self, parts: int) -> Kept | None:
        """What of the weights has room in registers; None: the rest has none in shared memory."""
        threads = threads_of(self.problem, Kept(parts, 0))
        if threads > MOST_UNITS or parts > 1 and Pieces(self.problem, parts // 2).of_gate == 1:
            return None
        each = REGISTERS // (-(-threads // FOUR_WARPS) * FOUR_WARPS)
        room = max(min(each, MOST) - BESIDE, 0) // 4
        tactic = Kept(parts, min(Pieces(self.problem, parts).count, room))
        return tactic if self.grid(tactic).shared_bytes <= self.gpu.shared else None

    def grid(self, tactic: Tactic) -> Grid:
        return Grid(1, 1, threads_of(self.problem, tactic), self.directions, 1, self.rows(tactic).end)

    def rows(self, tactic: Tactic) -> Rows:
        """Where a block has its states."""
        sources = sorted({0, *(stage.source for cell in self.problem.cells for stage in cell.stages)})
        threads = threads_of(self.problem, tactic)
        searching = threads if self.problem.rounds else 0
        if not isinstance(tactic, Kept):
            return Rows(0, 4 * self.problem.hidden, sources, searching)
        pieces = Pieces(self.problem, tactic.parts)
        return Rows((pieces.count - tactic.registers) * threads * PIECE, pieces.row_bytes, sources, searching)

    def cost(self, tactic: Tactic, card: Card, items: int) -> float:
        problem, grid, blocks = self.problem, self.grid(tactic), items * self.directions
        gates, turns = problem.cells[0].gates, -(-blocks // card.multiprocessors)
        from_l2 = card.l2 / card.hertz / card.multiprocessors       # bytes a cycle
        weights = Pieces(problem, 1).size * gates * problem.hidden ** 2
        if isinstance(tactic, Kept):
            pieces = Pieces(problem, tactic.parts)
            products = 8 if problem.precision == "int16" else 4
            instructions = products * pieces.count + pieces.of_gate + 2 * gates * tactic.parts.bit_length() + UPDATE
            registers = BESIDE + 4 * tactic.registers
            moved = (pieces.count - tactic.registers) * PIECE * grid.threads / SHARED_RATE
            first = weights * turns / from_l2
        else:
            instructions, registers = PLAIN * gates * problem.hidden + UPDATE, BESIDE
            moved, first = weights / from_l2, 0
        beside = max(1, min(REGISTERS // (registers * grid.threads), THREADS // grid.threads,
                            card.shared // grid.shared_bytes, turns))
        busy = max(instructions * grid.threads / ISSUE, moved)
        step = max(busy * beside, moved + instructions * SERIAL + WAIT)
        cycles = first + problem.steps * step * -(-turns // beside)
        return max(card.moving(problem.bytes * items), cycles / card.hertz + LAUNCH)

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """weights [D][G][k][unit], or as the lanes of a unit have them; units [constant][D][unit], scales [G][D][unit],
        first states [given][D unit]"""
        problem, hidden = self.problem, self.problem.hidden
        weights = np.asarray(constants["weights"])
        others = (constants["units"], problem.scales_by_gate(constants), problem.first_constants(constants))
        packed = (Pieces(problem, tactic.parts).pack(weights) if isinstance(tactic, Kept) else np.ascontiguousarray(
            weights.reshape(self.directions, -1, hidden, hidden).swapaxes(2, 3)))
        return (packed, *(_table(arrays, self.directions * hidden) for arrays in others))

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem = self.problem
        count = len(problem.inputs) + 4 + len(problem.outputs)
        f, operands, _ = begin_kernel(module, name, self.grid(tactic).threads, count)
        direction = special(f, "ctaid.y")
        for d in range(self.directions):
            with f.when(direction.compare("eq", d)):
                Direction(problem, self.gpu, f, operands, d, tactic, self.rows(tactic)).write()


def _table(arrays: Sequence[Any], width: int) -> Array:
    table = np.zeros((max(len(arrays), 1), width), np.float32)
    for row, array in zip(table, arrays, strict=False):
        row[:] = np.asarray(array, np.float32).reshape(-1)
    return table
