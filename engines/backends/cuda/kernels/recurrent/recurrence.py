"""Recurrent cells from step to step: a block for each item and direction, a thread for each unit.

    for t in time: for stage of the cell:
      sum[gate] = sum over k of state[k] * R[gate, k, unit]      the state from shared memory, R through the caches
      for update in stage.updates: state[slot] = program(...)    in registers
    h goes to y

What a later product reads of a state goes to shared memory between two barriers: h after the step, others after their
stage. Integer states are rounded when they are put there.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from engines.backends.cuda.codegen.gpu import WARP
from engines.backends.cuda.codegen.module import GpuModule, barrier, begin_kernel, shared, special, wide
from engines.backends.cuda.kernels.access import load_channels, store_channels
from engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import FLOAT, I8, I16, I32, I64
from engines.lowering.epilogue.program import EpilogueProgram
from engines.lowering.problems.problem import Array
from engines.lowering.problems.recurrence import QUANTIZED_STATES, Cell, Recurrence, Stage
from engines.lowering.problems.view import View

MOST_UNITS = 1024       # threads of a block

States = dict[int, Value]       # by slot: of the thread's unit


@solves(Recurrence)
class RecurrenceByBlock(GpuKernel[Recurrence]):
    @property
    def refusal(self) -> str:
        return "" if self.problem.hidden <= MOST_UNITS else f"a recurrent layer of more than {MOST_UNITS} units"

    @property
    def directions(self) -> int:
        return len(self.problem.cells)

    @cached_property
    def sources(self) -> list[int]:
        """The states that products read: each has a row of shared memory."""
        return sorted({0, *(stage.source for cell in self.problem.cells for stage in cell.stages)})

    def grid(self, tactic: Tactic) -> Grid:
        threads = -(-self.problem.hidden // WARP) * WARP
        return Grid(1, 1, threads, self.directions, 1, 4 * len(self.sources) * self.problem.hidden)

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """weights [D][G][k][unit], units [constant][D][unit], scales [G][D][unit], first states [given][D unit]"""
        problem, hidden = self.problem, self.problem.hidden
        weights = np.asarray(constants["weights"]).reshape(self.directions, -1, hidden, hidden).swapaxes(2, 3)
        others = (constants["units"], problem.scales_by_gate(constants), problem.first_constants(constants))
        return (np.ascontiguousarray(weights), *(_table(arrays, self.directions * hidden) for arrays in others))

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem = self.problem
        count = len(problem.inputs) + 4 + len(problem.outputs)
        f, operands, _ = begin_kernel(module, name, self.grid(tactic).threads, count)
        direction = special(f, "ctaid.y")
        for d in range(self.directions):
            with f.when(direction.compare("eq", d)):
                _Direction(self, f, operands, d).write()


class _Direction:
    """Writes the steps of one direction for one item."""

    def __init__(self, kernel: RecurrenceByBlock, f: Function, operands: list[Value], d: int) -> None:
        problem = kernel.problem
        self.kernel, self.problem, self.gpu, self.f, self.d = kernel, problem, kernel.gpu, f, d
        self.cell: Cell = problem.cells[d]
        self.exact = QUANTIZED_STATES.get(problem.precision)
        thread, item = special(f, "tid.x"), special(f, "ctaid.x")
        self.there = thread.below(problem.hidden)
        self.unit = thread.at_most(problem.hidden - 1)
        inputs = len(problem.inputs)
        placed = [operand + wide(item) * view.item for operand, view in zip(
            (*operands[:inputs], *operands[inputs + 4:]), (*problem.inputs, *problem.outputs), strict=True)]
        self.weights, *self.tables = operands[inputs:inputs + 4]
        given = iter(placed)
        self.gates = next(given)
        self.first = [next(given) if view else None for view in problem.first]
        self.length = next(given) if problem.lengths else None
        self.y = next(given) if problem.y else None
        self.last = [next(given) if view else None for view in problem.last]

    def write(self) -> None:
        f, problem = self.f, self.problem
        states = {slot: self._first(slot) for slot in range(self.cell.kept)}
        self._share(0, states[0])
        barrier(f)
        zero, steps = f.constant(0, I64), f.constant(problem.steps, I64)
        end = steps if self.length is None else wide(f.load(I32, self.length, 4, "length")).at_most(problem.steps)
        for turn in f.range("step", zero, end, states=states):
            t = end - 1 - turn if problem.backwards[self.d] else turn
            new = self._step(t, dict(states))
            states.update({slot: new[slot] for slot in states})
            barrier(f)
            self._share(0, states[0])
            barrier(f)
            self._to_y(t, states[0])
        for t in f.range("behind", end, steps):
            self._to_y(t, states[0].like(0))
        for state, view, address in zip(states.values(), problem.last, self.last, strict=True):
            if view and address:
                with f.when(self.there):
                    store_channels(self.gpu, view, [state], self._place(address, view))

    # ---- a step
    def _step(self, t: Value, states: States) -> States:
        """All states after it; 0 stays the old h for products and updates of the step."""
        old, new = states[0], states
        for stage in self.cell.stages:
            if stage.source != 0:
                self._share(stage.source, new[stage.source])
                barrier(self.f)
            sums, full = self._products(stage, t)
            for update in stage.updates:
                operands = [self._operand(source, t, sums, full, {**new, 0: old}) for source in update.operands]
                new[update.slot] = self._program(update.program, None, operands, update.numbers)
        return new

    def _operand(self, source: tuple[str, int], t: Value, sums: States, full: States, states: States) -> Value:
        kind, index = source
        if kind == "x":
            return self._x(t, index)
        if kind == "unit":
            return self._of_unit(self.tables[0], index)
        return {"sum": sums, "gate": full, "state": states}[kind][index]

    def _products(self, stage: Stage, t: Value) -> tuple[States, States]:
        """By gate: the sums as real numbers, and with x."""
        f, gpu, hidden = self.f, self.gpu, self.problem.hidden
        element, size = {"int16": (I16, 2), "int8": (I8, 1)}.get(self.problem.precision, (FLOAT, 4))
        acc = dict.fromkeys(stage.gates, f.constant(0, I32 if self.exact else FLOAT))
        column = self.weights + wide(self.unit) * size + self.d * self.cell.gates * hidden * hidden * size
        row = self._row(stage.source)
        for k in f.loop("k", hidden, acc=acc):
            state = f.load(I32 if self.exact else FLOAT, row + f.cast("trunc", k, I32, "k") * 4, 4, "state")
            for gate in stage.gates:
                at = column + (k * (hidden * size) + gate * hidden * hidden * size)
                weight = f.load(element, at, size, "weight")
                acc[gate] = acc[gate] + state * f.cast("sext", weight, I32, "wide") if self.exact else gpu.fma(
                    weight, state, acc[gate])
        sums, full = {}, {}
        for gate, total in acc.items():
            x = self._x(t, gate)
            if not self.exact:
                sums[gate], full[gate] = total, total + x
                continue
            total, scale = gpu.to_float(total), self._of_unit(self.tables[1], gate)
            sums[gate], full[gate] = total * scale, gpu.fma(total, scale, x)
        return sums, full

    def _x(self, t: Value, gate: int) -> Value:
        view = self.problem.gates
        first = (self.d * self.cell.gates + gate) * self.problem.hidden
        at = self.gates + t * view.strides[0] + wide(self.unit + first) * view.strides[1]
        return load_channels(self.gpu, view, at, 1)[0]

    # ---- states
    def _first(self, slot: int) -> Value:
        view, address = self.problem.first[slot], self.first[slot]
        if view and address:
            return load_channels(self.gpu, view, self._place(address, view), 1)[0]
        if slot in self.problem.given:
            return self._of_unit(self.tables[2], self.problem.given.index(slot))
        return self.f.constant(0, FLOAT)

    def _row(self, slot: int) -> Value:
        return shared(self.f) + self.kernel.sources.index(slot) * self.problem.hidden * 4

    def _share(self, slot: int, state: Value) -> None:
        """What the next products read of it."""
        value = self.gpu.round(state * float(self.exact.one)) if self.exact else state
        with self.f.when(self.there):
            self.f.store(value, self._row(slot) + self.unit * 4, 4)

    def _to_y(self, t: Value, h: Value) -> None:
        view = self.problem.y
        if view and self.y:
            result = self._program(self.problem.program, h, [], self.problem.numbers)
            with self.f.when(self.there):
                store_channels(self.gpu, view, [result], self._place(self.y, view) + t * view.strides[0])

    # ---- what is the thread's
    def _place(self, address: Value, view: View) -> Value:
        """Of the unit, in a tensor whose innermost axis is [D H]."""
        return address + wide(self.unit + self.d * self.problem.hidden) * view.strides[-1]

    def _of_unit(self, table: Value, row: int) -> Value:
        """In float32 [row][D unit]."""
        width = self.kernel.directions * self.problem.hidden
        at = table + wide(self.unit + (row * width + self.d * self.problem.hidden)) * 4
        return self.f.load(FLOAT, at, 4, "number")

    def _program(self, program: EpilogueProgram, sums: Value | None, operands: list[Value],
                 numbers: Sequence[float]) -> Value:
        return program.run(self.gpu, sums, operands, [self.f.constant(number, FLOAT) for number in numbers])


def _table(arrays: Sequence[Any], width: int) -> Array:
    table = np.zeros((max(len(arrays), 1), width), np.float32)
    for row, array in zip(table, arrays, strict=False):
        row[:] = np.asarray(array, np.float32).reshape(-1)
    return table
