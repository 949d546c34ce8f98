"""Division of a batch among the threads of a context: a chunk runs all steps of a plan for a group of items.

A plan with item-major runs keeps the intermediate tensors of one item in a core's L2. Chunks of single steps
(chunks.py) would pass those of the whole batch from core to core. A group runs as a batch of its own does on one
thread, in an arena of its own; to the executor it is one chunk, a call of run_steps with a step table for its items.

Buffers of a group share memory, so a chunk must not run twice: groups are never late. If the system takes a core from
a thread, the others wait for its group.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from infer_server.engines.backends.llvm.runtime.abi import CHUNK_WORDS, ChunkRow, StepRow
from infer_server.engines.backends.llvm.runtime.chunks import single_stage
from infer_server.engines.backends.llvm.runtime.execution import Arena
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan, Words, words
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import TensorView

GROUPS_PER_WORKER = 2           # more than one, so that a thread that the system slows down takes fewer groups
NEVER = 1 << 62                 # ticks after which a chunk is late


def divides_by_items(program: LoadedPlan, batch: int, workers: int) -> bool:
    """Return True if a batch runs in groups of items rather than step by step."""
    machine = program.machine
    return (batch >= workers and bool(machine.item_major) and all(step.symbol for step in machine.steps)
            and all(view.batched for view in (*machine.inputs, *machine.outputs))
            and len({view.buffer for view in machine.inputs}) == len(machine.inputs))


@dataclass(frozen=True)
class _Group:
    """Items of a batch, and the tables that run them."""
    items: range
    arena: Arena
    steps: Words


class Division:
    """Groups of the items of one batch size, and the schedule whose chunks they are."""

    def __init__(self, groups: Sequence[_Group], program: LoadedPlan, workers: int) -> None:
        self._groups = groups
        chunks = words(len(groups) + 1, CHUNK_WORDS)
        for row, group in zip(chunks, groups, strict=False):
            # A kernel takes its operands, rows and columns; in their places run_steps takes these.
            row[ChunkRow.FUNCTION], row[ChunkRow.OPERANDS] = program.run_steps_address, group.steps.ctypes.data
            row[ChunkRow.ROW_BEGIN], row[ChunkRow.ROW_END] = group.arena.operands, 0
            row[ChunkRow.COLUMN_BEGIN], row[ChunkRow.COLUMN_END] = len(group.steps), 1
            row[ChunkRow.LIMIT] = NEVER
        self.schedule = single_stage(chunks, workers)

    def outputs(self, view: TensorView) -> Iterator[tuple[range, Array]]:
        """Yield the items of each group, and the group's part of an output."""
        for group in self._groups:
            yield group.items, group.arena.array(view, len(group.items))


class ItemGroups:
    """Memory of the groups of a context, and the division of each batch size."""

    def __init__(self, program: LoadedPlan, inputs: Arena, workers: int) -> None:
        """Make no group yet. inputs: arena that holds the inputs of the whole batch."""
        self._program, self._inputs, self._workers = program, inputs, workers
        self._memory: list[Array] = []          # of each group, whatever the batch size
        self._divisions: dict[int, Division] = {}           # never removed, as late helpers may read their tables

    def division(self, batch: int) -> Division:
        """Return the division of a batch."""
        found = self._divisions.get(batch)
        if found is None:
            count = min(batch, self._workers * GROUPS_PER_WORKER)
            bounds = [batch * i // count for i in range(count + 1)]
            groups = [self._group(number, range(*items)) for number, items in enumerate(pairwise(bounds))]
            found = self._divisions[batch] = Division(groups, self._program, self._workers)
        return found

    def _group(self, number: int, items: range) -> _Group:
        layout = self._program.shared_layout
        if number == len(self._memory):
            self._memory.append(self._program.memory(layout.total))
        arena = Arena(self._program, layout, self._inputs, items, self._memory[number])
        arena.prepare(len(items))
        return _Group(items, arena, _step_table(self._program, arena, len(items)))


def _step_table(program: LoadedPlan, arena: Arena, items: int) -> Words:
    """Return the steps of the plan for so many items as rows whose grids do not depend on the batch."""
    parts = []
    for segment in program.serial_segments:
        if segment.by_item:
            parts.append(arena.items.steps(segment.first, segment.last))
        else:
            rows = program.steps[segment.first:segment.last].copy()
            rows[:, StepRow.ROWS] += items * rows[:, StepRow.ROWS_PER_ITEM]
            rows[:, StepRow.ROWS_PER_ITEM] = 0
            parts.append(rows)
    every = np.concatenate(parts)
    table = words(*every.shape)
    table[:] = every
    return table
