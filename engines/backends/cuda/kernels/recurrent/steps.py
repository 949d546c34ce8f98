"""Time steps of one direction, run by a block for its items; each thread updates its assignments (sharing.py).

States that later products read go to shared memory: h alternates between two rows, so that a step needs one barrier for
it; other states follow their stage. Integer states are rounded there; if the model quantises h to its own range, the
block first reduces that range. A block of several items runs until the longest ends; finished items keep their states.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from infer_server.engines.backends.cuda.codegen.gpu import WARP, Gpu
from infer_server.engines.backends.cuda.codegen.module import (
    barrier,
    elements,
    shared,
    shuffle_xor,
    special_register,
    vector_of,
    wide,
)
from infer_server.engines.backends.cuda.kernels.access import load_channels, store_channels
from infer_server.engines.backends.cuda.kernels.recurrent.sharing import Seat, Sharing, whole
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import FLOAT, I32, I64, vector
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.recurrence import QUANTIZED_STATES, Cell, Recurrence, Stage
from infer_server.engines.lowering.problems.view import View

Key = tuple[int, int]           # (assignment of the thread, slot or gate)
States = dict[Key, Value]
Carried = dict[Any, Value]      # "row": offset of h; with quantised h ("zero", item) and ("step", item)


@dataclass(frozen=True)
class StateRows:
    """Layout of states in shared memory from `begin` on.

    There is a row for each state that products read, a second one for h, then `searching` pairs of extremes of each
    warp and item if ranges are needed.
    """
    begin: int
    row: int
    sources: Sequence[int]
    searching: int

    @property
    def count(self) -> int:
        return len(self.sources) + 1

    @property
    def extremes(self) -> int:
        return self.begin + whole(self.count * self.row, 8)

    @property
    def end(self) -> int:
        return self.extremes + self.searching * 8

    def of(self, slot: int) -> int:
        """Return the offset of a slot's row."""
        return self.begin + self.sources.index(slot) * self.row


class Direction:
    """Emitter of a direction's steps. `items` is the batch size."""

    def __init__(self, problem: Recurrence, gpu: Gpu, f: Function, operands: list[Value], items: Value, d: int,
                 sharing: Sharing, rows: StateRows) -> None:
        self.problem, self.gpu, self.f, self.d, self.rows, self.sharing = problem, gpu, f, d, rows, sharing
        self.cell: Cell = problem.cells[d]
        self.exact = QUANTIZED_STATES.get(problem.precision)
        self.thread, self.threads = special_register(f, "tid.x"), sharing.threads(problem)
        inputs = len(problem.inputs)
        weights, *self.tables = operands[inputs:inputs + 4]
        self.seat = Seat(gpu, f, problem, d, self.threads, self.thread, special_register(f, "ctaid.x") * sharing.items,
                         items if sharing.items > 1 else None, weights)
        self.products = sharing.products(self.seat)
        self.assignments, self.of_item = self.products.assignments, self.products.of_item
        self.item_of = {n: item for item, numbers in enumerate(self.of_item) for n in numbers}
        tensors = (*operands[:inputs], *operands[inputs + 4:])
        views = iter(zip(tensors, (*problem.inputs, *problem.outputs), strict=True))
        self.gates = self._by_item(*next(views))
        self.first = [self._by_item(*next(views)) if view else None for view in problem.first]
        lengths = next(views) if problem.lengths else None
        self.y = self._by_item(*next(views)) if problem.y else None
        self.last = [self._by_item(*next(views)) if view else None for view in problem.last]
        steps = f.constant(problem.steps, I64)
        self.ends = [self._length(address) for address in self._by_item(*lengths)] if lengths else [steps] * len(
            self.of_item)
        self.longest = self._longest(*lengths) if lengths and sharing.items > 1 else self.ends[0]

    def _by_item(self, address: Value, view: View) -> list[Value]:
        """Return the address of each of the thread's items."""
        return [address + wide(self.assignments[first].item) * view.item for first, *_ in self.of_item]

    def _length(self, address: Value) -> Value:
        return wide(self.f.load(I32, address, 4, "length")).at_most(self.problem.steps)

    def _longest(self, address: Value, view: View) -> Value:
        """Return the longest sequence among the block's items."""
        ends = [self._length(address + wide(self.seat.item(column)) * view.item)
                for column in range(self.sharing.items)]
        return reduce(lambda a, b: self.f.call(I64, "llvm.umax.i64", a, b, hint="longest"), ends)

    def write(self) -> None:
        f, problem, sharing = self.f, self.problem, self.sharing
        states = {(n, slot): self._first(n, slot) for n in range(len(self.assignments))
                  for slot in range(self.cell.kept)}
        self.products.begin(shared(f) + self.rows.begin, self.rows.count)
        barrier(f)
        carried: Carried = {"row": f.constant(0, I32)}
        carried |= self._share(states, 0, self._row(0))
        barrier(f)
        zero = f.constant(0, I64)
        following = self._x(zero, range(self.cell.gates)) if sharing.ahead else {}
        for turn in f.range("step", zero, self.longest, states=states, carried=carried, x=following):
            x, before = dict(following), dict(carried)
            if sharing.ahead:
                following.update(self._x(turn + 1, range(self.cell.gates)))
            new = self._step(turn, x, dict(states), before)
            for n, slot in states:
                states[n, slot] = self._unless_ended(turn, n, new[n, slot], states[n, slot])
            carried["row"] = (self.rows.count - 1) * self.rows.row - before["row"]
            carried.update(self._share(states, 0, self._row(0) + carried["row"]))
            barrier(f)
            self._to_y(turn, states)
        if problem.lengths:
            self._behind()
        for slot, (view, addresses) in enumerate(zip(problem.last, self.last, strict=True)):
            for n, assignment in enumerate(self.assignments):
                if view and addresses:
                    with f.when(assignment.valid):
                        store_channels(self.gpu, view, [states[n, slot]], self._address(addresses, view, n))

    def _time(self, turn: Value, item: int) -> Value:
        """Return the time index of a step of an item, clamped to valid steps."""
        backwards = self.problem.backwards[self.d]
        return (self.ends[item] - 1 - turn if backwards else turn).at_most(self.problem.steps - 1)

    def _unless_ended(self, turn: Value, n: int, new: Value, old: Value) -> Value:
        if self.longest is self.ends[0]:
            return new
        return self.f.select(turn.below(self.ends[self.item_of[n]]), new, old, "kept")

    # ---- a step
    def _step(self, turn: Value, x: States, states: States, carried: Carried) -> States:
        """Return all states after a step. Products and updates read the old h throughout."""
        old, new, numbers = dict(states), states, range(len(self.assignments))
        for stage in self.cell.stages:
            row = self._row(stage.source)
            if stage.source == 0:
                row = row + carried["row"]
            else:
                self._share(new, stage.source, row)
                barrier(self.f)
            sums, full = self._products(stage, row, turn, x, carried)
            for update in stage.updates:
                for n in numbers:
                    seen = {**new, (n, 0): old[n, 0]}
                    operands = [self._operand(n, source, x, sums, full, seen) for source in update.operands]
                    new[n, update.slot] = self._program(update.program, None, operands, update.numbers)
        return new

    def _operand(self, n: int, source: tuple[str, int], x: States, sums: States, full: States, states: States) -> Value:
        kind, index = source
        if kind == "unit":
            return self._of_unit(self.tables[0], n, index)
        return {"x": x, "sum": sums, "gate": full, "state": states}[kind][n, index]

    def _products(self, stage: Stage, row: Value, turn: Value, x: States, carried: Carried) -> tuple[States, States]:
        """Return the products as real numbers, without and with x."""
        sums, full, rounds = {}, {}, self.problem.rounds
        zeros = [carried["zero", self.item_of[n]] for n in range(len(self.assignments))] if rounds else []
        found = self.products.sums(stage, row, zeros)
        if not self.sharing.ahead:
            x.update(self._x(turn, stage.gates))
        for gate, totals in found.items():
            for n, total in enumerate(totals):
                if not self.exact:
                    sums[n, gate], full[n, gate] = total, total + x[n, gate]
                    continue
                total, scale = self.gpu.to_float(total), self._of_unit(self.tables[1], n, gate)
                scale = scale * carried["step", self.item_of[n]] if rounds else scale
                sums[n, gate], full[n, gate] = total * scale, self.gpu.fma(total, scale, x[n, gate])
        return sums, full

    def _x(self, turn: Value, gates: Sequence[int]) -> States:
        view, found = self.problem.gates, {}
        at = [address + self._time(turn, item) * view.strides[0] for item, address in enumerate(self.gates)]
        for gate in gates:
            first = (self.d * self.cell.gates + gate) * self.problem.hidden
            for n, assignment in enumerate(self.assignments):
                address = at[self.item_of[n]] + wide(assignment.unit + first) * view.strides[1]
                found[n, gate], = load_channels(self.gpu, view, address, 1)
        return found

    # ---- states
    def _first(self, n: int, slot: int) -> Value:
        view, addresses = self.problem.first[slot], self.first[slot]
        if view and addresses:
            return load_channels(self.gpu, view, self._address(addresses, view, n), 1)[0]
        if slot in self.problem.given:
            return self._of_unit(self.tables[2], n, self.problem.given.index(slot))
        return self.f.constant(0, FLOAT)

    def _row(self, slot: int) -> Value:
        return shared(self.f) + self.rows.of(slot)

    def _share(self, states: States, slot: int, row: Value) -> Carried:
        """Store a state in shared memory for the next products."""
        found: Carried = {}
        values = [states[n, slot] for n in range(len(self.assignments))]
        if self.problem.rounds:
            values, found = self._by_own_range(values)
        elif self.exact:
            values = [self.gpu.round(value * float(self.exact.one)) for value in values]
        for n, (assignment, value) in enumerate(zip(self.assignments, values, strict=True)):
            with self.f.when(assignment.puts):
                self.products.put(row, assignment, value, found.get(("zero", self.item_of[n])))
        return found

    def _by_own_range(self, states: Sequence[Value]) -> tuple[list[Value], Carried]:
        """Quantise states to their own range of 256 steps, as problems.recurrence.by_own_range.

        Returns the integers, and the zero point and the step of each item.
        """
        f, gpu, found = self.f, self.gpu, Carried()
        values = list(states)
        for item, (low, high) in enumerate(self._extremes(states)):
            step = (high - low) / 255.0
            step = f.select(step.compare("oeq", 0.0), step.like(1.0), step, "step")
            zero = gpu.max(gpu.min(gpu.unary("rint", (low.like(0.0) - low) / step), 255.0), 0.0)
            for n in self.of_item[item]:
                steps = gpu.max(gpu.min(gpu.unary("rint", states[n] / step) + zero, 255.0), 0.0)
                values[n] = gpu.round(steps - zero)
            found["zero", item], found["step", item] = gpu.round(zero), step
        return values, found

    def _extremes(self, states: Sequence[Value]) -> list[tuple[Value, Value]]:
        """Return the minimum and maximum of each of the thread's items over the block, with 0 included."""
        f, gpu, lanes = self.f, self.gpu, self.sharing.lanes
        columns = [self.assignments[first].column for first, *_ in self.of_item]
        assignments = [shared(f) + (column * 8 + self.rows.extremes) for column in columns]
        warp, of_warp = self.thread.divided(WARP), self.sharing.items * 8
        found = []
        for numbers in self.of_item:
            low, high = (reduce(better, [states[n] for n in numbers[1:]], better(states[numbers[0]], 0.0))
                         for better in (gpu.min, gpu.max))
            for distance in lanes:
                low, high = gpu.min(low, shuffle_xor(low, distance)), gpu.max(high, shuffle_xor(high, distance))
            found.append((low, high))
        with f.when((self.thread & sum(lanes)).compare("eq", 0)):
            for assignment, pair in zip(assignments, found, strict=True):
                f.store(vector_of(list(pair)), assignment + warp * of_warp, 8)
        barrier(f)
        for other in range(self.threads // WARP):
            for item, assignment in enumerate(assignments):
                least, most = elements(f.load(vector(2, FLOAT), assignment + other * of_warp, 8, "extremes"))
                found[item] = gpu.min(found[item][0], least), gpu.max(found[item][1], most)
        return found

    # ---- results
    def _to_y(self, turn: Value, states: States) -> None:
        for n, assignment in enumerate(self.assignments):
            item = self.item_of[n]
            valid = assignment.valid
            if self.longest is not self.ends[0]:
                valid = valid & turn.below(self.ends[item])
            self._store_y(n, self._time(turn, item), states[n, 0], valid)

    def _behind(self) -> None:
        """Store zeros after the ends of the items."""
        steps = self.f.constant(self.problem.steps, I64)
        for item, numbers in enumerate(self.of_item):
            for t in self.f.range("behind", self.ends[item], steps):
                for n in numbers:
                    self._store_y(n, t, self.f.constant(0, FLOAT), self.assignments[n].valid)

    def _store_y(self, n: int, t: Value, h: Value, valid: Value) -> None:
        view = self.problem.y
        if view and self.y:
            result = self._program(self.problem.program, h, [], self.problem.numbers)
            with self.f.when(valid):
                store_channels(self.gpu, view, [result], self._address(self.y, view, n) + t * view.strides[0])

    # ---- addresses of an assignment
    def _address(self, addresses: Sequence[Value], view: View, n: int) -> Value:
        """Return the address of the unit of an assignment in a tensor whose innermost axis is [D H]."""
        unit = self.assignments[n].unit + self.d * self.problem.hidden
        return addresses[self.item_of[n]] + wide(unit) * view.strides[-1]

    def _of_unit(self, table: Value, n: int, row: int) -> Value:
        """Load the number of an assignment from a float32 table [row][D unit]."""
        width = len(self.problem.cells) * self.problem.hidden
        at = table + wide(self.assignments[n].unit + (row * width + self.d * self.problem.hidden)) * 4
        return self.f.load(FLOAT, at, 4, "number")

    def _program(self, program: EpilogueProgram, sums: Value | None, operands: list[Value],
                 numbers: Sequence[float]) -> Value:
        return program.run(self.gpu, sums, operands, [self.f.constant(number, FLOAT) for number in numbers])
