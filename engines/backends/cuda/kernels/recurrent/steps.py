"""The steps of one direction for one item, as a block goes through them.

What a later product reads of a state goes to shared memory: h into one of two rows by turns, so that a step needs one
barrier for it; others after their stage. Integer states are rounded there; where the model itself rounds h to its own
range, the block finds that range first.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.backends.cuda.codegen.gpu import WARP, Gpu
from engines.backends.cuda.codegen.module import across, barrier, elements, shared, special, vector_of, wide
from engines.backends.cuda.kernels.access import load_channels, store_channels
from engines.backends.cuda.kernels.kernel import Tactic
from engines.backends.cuda.kernels.recurrent.weights import (
    FromLanes,
    Kept,
    Seat,
    StepProducts,
    ThroughCaches,
    threads_of,
)
from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import FLOAT, I32, I64, vector
from engines.lowering.epilogue.program import EpilogueProgram
from engines.lowering.problems.recurrence import QUANTIZED_STATES, Cell, Recurrence, Stage
from engines.lowering.problems.view import View

States = dict[int, Value]       # by slot: of the thread's unit
Carried = dict[str, Value]      # where the row of h is; of states rounded to their own range: "zero" and "step"


@dataclass(frozen=True)
class Rows:
    """Shared memory behind `begin`: a row for each state that products read, h's second one, and the extremes of warps,
    if so many threads look for them."""
    begin: int
    row: int
    sources: Sequence[int]
    searching: int

    @property
    def count(self) -> int:
        return len(self.sources) + 1

    @property
    def extremes(self) -> int:
        return self.begin + -(-self.count * self.row // 8) * 8

    @property
    def end(self) -> int:
        return self.extremes + self.searching // WARP * 8

    def of(self, slot: int) -> int:
        return self.begin + self.sources.index(slot) * self.row


class Direction:
    """Writes them."""

    def __init__(self, problem: Recurrence, gpu: Gpu, f: Function, operands: list[Value], d: int, tactic: Tactic,
                 rows: Rows) -> None:
        self.problem, self.gpu, self.f, self.d, self.rows = problem, gpu, f, d, rows
        self.cell: Cell = problem.cells[d]
        self.exact = QUANTIZED_STATES.get(problem.precision)
        parts = tactic.parts if isinstance(tactic, Kept) else 1
        self.threads = threads_of(problem, tactic)
        self.thread, item = special(f, "tid.x"), special(f, "ctaid.x")
        unit, part = self.thread.divided(parts), self.thread.remainder(parts)
        self.there = unit.below(problem.hidden) & part.compare("eq", 0)
        self.unit = unit.at_most(problem.hidden - 1)
        inputs = len(problem.inputs)
        placed = [operand + wide(item) * view.item for operand, view in zip(
            (*operands[:inputs], *operands[inputs + 4:]), (*problem.inputs, *problem.outputs), strict=True)]
        weights, *self.tables = operands[inputs:inputs + 4]
        given = iter(placed)
        self.gates = next(given)
        self.first = [next(given) if view else None for view in problem.first]
        self.length = next(given) if problem.lengths else None
        self.y = next(given) if problem.y else None
        self.last = [next(given) if view else None for view in problem.last]
        seat = Seat(gpu, f, problem, d, self.threads, self.thread, self.unit, part, weights)
        self.products: StepProducts = FromLanes(seat, tactic) if isinstance(tactic, Kept) else ThroughCaches(seat)

    def write(self) -> None:
        f, problem = self.f, self.problem
        states = {slot: self._first(slot) for slot in range(self.cell.kept)}
        self.products.begin(shared(f) + self.rows.begin, self.rows.count)
        barrier(f)
        carried: Carried = {"row": f.constant(0, I32)}
        carried |= self._share(states[0], self._row(0))
        barrier(f)
        zero, steps = f.constant(0, I64), f.constant(problem.steps, I64)
        end = steps if self.length is None else wide(f.load(I32, self.length, 4, "length")).at_most(problem.steps)
        following = self._x(self._time(zero, end))
        for turn in f.range("step", zero, end, states=states, carried=carried, x=following):
            x, before = dict(following), dict(carried)
            following.update(self._x(self._time(turn + 1, end)))
            new = self._step(x, dict(states), before)
            states.update({slot: new[slot] for slot in states})
            carried["row"] = (self.rows.count - 1) * self.rows.row - before["row"]
            carried.update(self._share(states[0], self._row(0) + carried["row"]))
            barrier(f)
            self._to_y(self._time(turn, end), states[0])
        for t in f.range("behind", end, steps):
            self._to_y(t, states[0].like(0))
        for state, view, address in zip(states.values(), problem.last, self.last, strict=True):
            if view and address:
                with f.when(self.there):
                    store_channels(self.gpu, view, [state], self._place(address, view))

    def _time(self, turn: Value, end: Value) -> Value:
        """Of the turn; of one behind the last, any that there is."""
        return (end - 1 - turn if self.problem.backwards[self.d] else turn).at_most(self.problem.steps - 1)

    # ---- a step
    def _step(self, x: States, states: States, carried: Carried) -> States:
        """All states after it; 0 stays the old h for products and updates of the step."""
        old, new = states[0], states
        for stage in self.cell.stages:
            row = self._row(stage.source)
            if stage.source == 0:
                row = row + carried["row"]
            else:
                self._share(new[stage.source], row)
                barrier(self.f)
            sums, full = self._products(stage, row, x, carried)
            for update in stage.updates:
                operands = [self._operand(source, x, sums, full, {**new, 0: old}) for source in update.operands]
                new[update.slot] = self._program(update.program, None, operands, update.numbers)
        return new

    def _operand(self, source: tuple[str, int], x: States, sums: States, full: States, states: States) -> Value:
        kind, index = source
        if kind == "unit":
            return self._of_unit(self.tables[0], index)
        return {"x": x, "sum": sums, "gate": full, "state": states}[kind][index]

    def _products(self, stage: Stage, row: Value, x: States, carried: Carried) -> tuple[States, States]:
        """By gate: the sums as real numbers, and with x."""
        sums, full = {}, {}
        for gate, total in self.products.sums(stage, row, carried.get("zero")).items():
            if not self.exact:
                sums[gate], full[gate] = total, total + x[gate]
                continue
            total, scale = self.gpu.to_float(total), self._of_unit(self.tables[1], gate)
            scale = scale * carried["step"] if self.problem.rounds else scale
            sums[gate], full[gate] = total * scale, self.gpu.fma(total, scale, x[gate])
        return sums, full

    def _x(self, t: Value) -> States:
        """By gate."""
        view, found = self.problem.gates, {}
        for gate in range(self.cell.gates):
            first = (self.d * self.cell.gates + gate) * self.problem.hidden
            at = self.gates + t * view.strides[0] + wide(self.unit + first) * view.strides[1]
            found[gate], = load_channels(self.gpu, view, at, 1)
        return found

    # ---- states
    def _first(self, slot: int) -> Value:
        view, address = self.problem.first[slot], self.first[slot]
        if view and address:
            return load_channels(self.gpu, view, self._place(address, view), 1)[0]
        if slot in self.problem.given:
            return self._of_unit(self.tables[2], self.problem.given.index(slot))
        return self.f.constant(0, FLOAT)

    def _row(self, slot: int) -> Value:
        return shared(self.f) + self.rows.of(slot)

    def _share(self, state: Value, row: Value) -> Carried:
        """What the next products read of it."""
        found: Carried = {}
        if self.problem.rounds:
            whole, zero, found["step"] = self._by_own_range(state)
            state, found["zero"] = self.gpu.round(whole), self.gpu.round(zero)
        elif self.exact:
            state = self.gpu.round(state * float(self.exact.one))
        with self.f.when(self.there):
            self.products.put(row, state, found.get("zero"))
        return found

    def _by_own_range(self, state: Value) -> tuple[Value, Value, Value]:
        """(integers as floats, that of 0 among 256 steps, the step): problems.recurrence.by_own_range."""
        f, gpu = self.f, self.gpu
        low, high = self._extremes(gpu.min(state, 0.0), gpu.max(state, 0.0))
        step = (high - low) / 255.0
        step = f.select(step.compare("oeq", 0.0), step.like(1.0), step, "step")
        zero = gpu.max(gpu.min(gpu.unary("rint", (low.like(0.0) - low) / step), 255.0), 0.0)
        whole = gpu.max(gpu.min(gpu.unary("rint", state / step) + zero, 255.0), 0.0)
        return whole - zero, zero, step

    def _extremes(self, low: Value, high: Value) -> tuple[Value, Value]:
        """Of the block."""
        f, gpu = self.f, self.gpu
        for distance in (16, 8, 4, 2, 1):
            low, high = gpu.min(low, across(low, distance)), gpu.max(high, across(high, distance))
        place = shared(f) + self.rows.extremes
        with f.when((self.thread & WARP - 1).compare("eq", 0)):
            f.store(vector_of([low, high]), place + self.thread.divided(WARP) * 8, 8)
        barrier(f)
        for warp in range(self.threads // WARP):
            least, most = elements(f.load(vector(2, FLOAT), place + warp * 8, 8, "extremes"))
            low, high = gpu.min(low, least), gpu.max(high, most)
        return low, high

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
        width = len(self.problem.cells) * self.problem.hidden
        at = table + wide(self.unit + (row * width + self.d * self.problem.hidden)) * 4
        return self.f.load(FLOAT, at, 4, "number")

    def _program(self, program: EpilogueProgram, sums: Value | None, operands: list[Value],
                 numbers: Sequence[float]) -> Value:
        return program.run(self.gpu, sums, operands, [self.f.constant(number, FLOAT) for number in numbers])
