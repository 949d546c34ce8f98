"""Recurrent products with weights read through the caches: a thread has a unit, for all items of the block.

    for k: for gate: weight = R[gate, k, unit]; for item: sum[gate, item] += weight * state[k, item]

The weights are read in every step. This is for layers too large for registers and shared memory.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import elements, wide
from infer_server.engines.backends.cuda.cost import PLAIN
from infer_server.engines.backends.cuda.kernels.recurrent.sharing import (
    PIECE,
    SIZES,
    Assignment,
    Seat,
    Sharing,
    StepProducts,
    StepWork,
    Sums,
    update,
    whole,
)
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import FLOAT, I8, I16, I32, vector
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.recurrence import Recurrence, Stage

BASE_REGISTERS = 48     # registers per thread in addition to those of its items


@dataclass(frozen=True)
class ThroughCaches(Sharing):
    """Tactic with one unit per thread and `items` items per block."""
    items: int

    def __str__(self) -> str:
        return f"{self.items} items a block, weights through the caches"

    def threads(self, problem: Recurrence) -> int:
        return whole(problem.hidden, WARP)

    def row_bytes(self, problem: Recurrence) -> int:
        return whole(4 * problem.hidden * self.items, PIECE)

    def work(self, problem: Recurrence) -> StepWork:
        cell, hidden = problem.cells[0], problem.hidden
        each = cell.gates * (self.items + PLAIN - 1)        # load of the weight, and its products
        registers = BASE_REGISTERS + self.items * (3 * cell.gates + cell.kept)
        return StepWork(each * hidden + update(problem) * self.items, 0, 0,
                        SIZES[problem.precision] * cell.gates * hidden ** 2, 0, registers)

    def pack(self, problem: Recurrence, weights: Array) -> Array:
        """Return the weights as [D][G][k][unit]."""
        return np.ascontiguousarray(weights.reshape(len(weights), -1, problem.hidden, problem.hidden).swapaxes(2, 3))

    def products(self, seat: Seat) -> StepProducts:
        return _Products(seat, self)


class _Products(StepProducts):
    """Emitter of the products.

    A row of states is [unit][item], padded with zeros for loads of four where three remain.
    """

    def __init__(self, seat: Seat, tactic: ThroughCaches) -> None:
        super().__init__(seat)
        self.row_bytes, items = tactic.row_bytes(seat.problem), tactic.items
        surely = seat.threads == seat.problem.hidden
        columns = (seat.f.constant(column, I32) for column in range(items))
        self.assignments = [seat.assign(seat.thread, column, surely=surely) for column in columns]
        self.of_item = [[column] for column in range(items)]

    def begin(self, rows: Value, count: int) -> None:
        self.clear(rows, count * self.row_bytes)

    def put(self, row: Value, assignment: Assignment, state: Value, zero: Value | None) -> None:
        self.f.store(state, row + (assignment.unit * len(self.assignments) + assignment.column) * 4, 4)

    def sums(self, stage: Stage, row: Value, zeros: Sequence[Value]) -> Sums:
        f, seat, hidden, items = self.f, self.seat, self.problem.hidden, len(self.assignments)
        size = SIZES[self.problem.precision]
        element = {1: I8, 2: I16, 4: FLOAT}[size]
        acc = {(gate, n): self.zero for gate in stage.gates for n in range(items)}
        first = seat.direction * self.problem.cells[0].gates * hidden * hidden * size
        column = seat.weights + wide(self.assignments[0].unit) * size + first
        for k in f.loop("k", hidden, acc=acc):
            states = self._states(row + f.cast("trunc", k, I32, "k") * (4 * items))
            for gate in stage.gates:
                weight = f.load(element, column + (k * (hidden * size) + gate * hidden * hidden * size), size, "weight")
                weight = f.cast("sext", weight, I32, "wide") if self.integers else weight
                for n, state in enumerate(states):
                    acc[gate, n] = (acc[gate, n] + state * weight if self.integers else
                                    self.gpu.fma(weight, state, acc[gate, n]))
        return {gate: [acc[gate, n] for n in range(items)] for gate in stage.gates}

    def _states(self, at: Value) -> list[Value]:
        count, type_ = len(self.assignments), self.zero.type
        if count == 1:
            return [self.f.load(type_, at, 4, "state")]
        return [state for n in range(0, count, 4)
                for state in elements(self.f.load(vector(4, type_), at + n * 4, 16, "states"))]
