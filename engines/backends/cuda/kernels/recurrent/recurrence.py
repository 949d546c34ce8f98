"""Recurrent layers: one block per group of items and direction runs all time steps.

    for t in time: for stage of the cell:
      sum[gate] = sum over k of state[k] * R[gate, k, unit]      states in shared memory
      for update in stage.updates: state[slot] = program(...)    in registers (steps.py)
    store h to y

Weights of a direction that fit into a block's registers and shared memory are read once (lanes.py, warps.py); others
are read through the caches in every step (caches.py).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special_register
from infer_server.engines.backends.cuda.cost import ISSUE, L2_PORT, LAUNCH, REGISTERS, SHARED_RATE, THREADS, Card
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, solves
from infer_server.engines.backends.cuda.kernels.recurrent.caches import ThroughCaches
from infer_server.engines.backends.cuda.kernels.recurrent.lanes import BASE_REGISTERS, Kept, Pieces
from infer_server.engines.backends.cuda.kernels.recurrent.sharing import Sharing
from infer_server.engines.backends.cuda.kernels.recurrent.steps import Direction, StateRows
from infer_server.engines.backends.cuda.kernels.recurrent.warps import tilings
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.recurrence import Recurrence

MOST_UNITS = 1024       # maximum threads per block
PARTS = (8, 4, 16, 2, 1)
ITEMS = (1, 4, 8)       # items per block that share weights read through the caches
MOST = 248              # registers of a thread
FOUR_WARPS = 4 * WARP   # granularity of register allocation, in threads
PRODUCT, SCHEDULERS = 16 * 8 * 32, 4    # multiply-adds of an mma; partitions of a multiprocessor
WAIT = 500              # stall cycles per step: shared memory, shuffles, dependent instructions of the update


@solves(Recurrence)
class RecurrenceByBlock(GpuKernel[Recurrence]):
    """Kernel for recurrent layers."""

    @property
    def refusal(self) -> str:
        return "" if self.problem.hidden <= MOST_UNITS else f"a recurrent layer of more than {MOST_UNITS} units"

    @property
    def directions(self) -> int:
        return len(self.problem.cells)

    def tactics(self) -> Sequence[Sharing]:
        tiled = (tiling.settled(self.problem, self._registers(tiling.threads(self.problem)), self.gpu.shared)
                 for tiling in tilings(self.problem, self.gpu))
        return [*filter(None, map(self._kept, PARTS)),
                *filter(self._fits, [*dict.fromkeys(tiled), *map(ThroughCaches, ITEMS)])]

    def _kept(self, parts: int) -> Kept | None:
        """Return the tactic of lanes.py with as many pieces in registers as fit.

        Returns None if the remaining ones exceed shared memory.
        """
        threads = Kept(parts, 0).threads(self.problem)
        if threads > MOST_UNITS or parts > 1 and Pieces(self.problem, parts // 2).of_gate == 1:
            return None
        tactic = Kept(parts, min(Pieces(self.problem, parts).count,
                                 max(self._registers(threads) - BASE_REGISTERS, 0) // 4))
        return tactic if self._fits(tactic) else None

    def _registers(self, threads: int) -> int:
        """Return the registers per thread for a block of `threads` threads."""
        return min(REGISTERS // (-(-threads // FOUR_WARPS) * FOUR_WARPS), MOST)

    def _fits(self, tactic: Sharing) -> bool:
        grid = self.grid(tactic)
        return grid.threads <= MOST_UNITS and grid.shared_bytes <= self.gpu.shared and (
            tactic.items == 1 or tactic.work(self.problem).registers <= self._registers(grid.threads))

    def grid(self, tactic: Sharing) -> Grid:
        return Grid(1, tactic.items, tactic.threads(self.problem), self.directions, 1, self.rows(tactic).end)

    def rows(self, tactic: Sharing) -> StateRows:
        """Return the layout of a block's states in shared memory."""
        sources = sorted({0, *(stage.source for cell in self.problem.cells for stage in cell.stages)})
        searching = tactic.threads(self.problem) // WARP * tactic.items if self.problem.rounds else 0
        return StateRows(tactic.kept_bytes(self.problem), tactic.row_bytes(self.problem), sources, searching)

    def cost(self, tactic: Sharing, card: Card, items: int) -> float:
        problem, grid, work = self.problem, self.grid(tactic), tactic.work(self.problem)
        blocks = -(-items // tactic.items) * self.directions
        turns = -(-blocks // card.multiprocessors)
        from_l2 = min(card.l2 / card.hertz / min(blocks, card.multiprocessors), L2_PORT)        # bytes a cycle
        moved = work.shared / SHARED_RATE + work.through / from_l2
        resident = max(1, min(REGISTERS // (work.registers * grid.threads), THREADS // grid.threads,
                              card.shared // grid.shared_bytes, turns))
        products = work.products * PRODUCT / card.products["int8"]      # cycles per warp on a whole multiprocessor
        busy = max(work.instructions * grid.threads / ISSUE, moved, products * grid.threads / WARP)
        step = max(busy * resident, moved + work.instructions * tactic.serial + products * SCHEDULERS + WAIT)
        cycles = work.before * turns / from_l2 + problem.steps * step * -(-turns // resident)
        return max(card.copy_seconds(problem.bytes * items), cycles / card.hertz + LAUNCH)

    def pack(self, tactic: Sharing, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return the packed constants.

        Returns
        -------
        tuple of ndarray
            Weights in the tactic's layout, then float32 tables: unit constants [constant][D][unit], scales [G][D][unit]
            and initial states [given][D unit].
        """
        problem = self.problem
        others = (constants["units"], problem.scales_by_gate(constants), problem.first_constants(constants))
        return (tactic.pack(problem, np.asarray(constants["weights"])),
                *(_table(arrays, self.directions * problem.hidden) for arrays in others))

    def emit(self, module: GpuModule, name: str, tactic: Sharing) -> None:
        problem = self.problem
        count = len(problem.inputs) + 4 + len(problem.outputs)
        f, operands, items = begin_kernel(module, name, self.grid(tactic).threads, count)
        module.min_blocks[name] = 1         # else ptxas spills kilobytes to fit two blocks
        direction = special_register(f, "ctaid.y")
        for d in range(self.directions):
            with f.when(direction.compare("eq", d)):
                Direction(problem, self.gpu, f, operands, items, d, tactic, self.rows(tactic)).write()


def _table(arrays: Sequence[Any], width: int) -> Array:
    table = np.zeros((max(len(arrays), 1), width), np.float32)
    for row, array in zip(table, arrays, strict=False):
        row[:] = np.asarray(array, np.float32).reshape(-1)
    return table
