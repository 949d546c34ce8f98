"""Code of a Recurrence: cells from step to step. recurrence.py defines the layout of weights, microkernel.py of states.

    for direction: for block of items:             the states of the block stay in scratch on the stack
      for t in time:
        for stage of the cell:                     see problems/recurrence.py
          for panel of units: for tile of items:   a call of the micro-kernel:
            for k in units:
              sum[item, gate, unit] += state[item, k] * R[gate, unit, k]         all in registers
            the updates of the stage; h goes to y

h has two buffers that are swapped after each step, so that the units of a step may be computed in any order. Large
layers are bound by reading R in every step. Each panel's weights are therefore read once for all items of the block; K
may be read at several places at once, since a core keeps more cache misses in flight if they belong to several streams;
and every other step may take the panels backwards, to begin with those that are still in a cache.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import TAILS
from infer_server.engines.backends.llvm.kernels.common.pixels import load_channels, store_channels
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, begin_kernel
from infer_server.engines.backends.llvm.kernels.recurrent.microkernel import LINE, MicroKernels
from infer_server.engines.backends.llvm.kernels.recurrent.order import there_and_back, tiles_of_items
from infer_server.engines.backends.llvm.kernels.recurrent.rounding import Crowded, round_state
from infer_server.engines.backends.llvm.kernels.recurrent.tiling import BLOCK, Panels, RecurrenceTiling
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I8, I32, I64, PTR, vector
from infer_server.engines.lowering.problems.view import View


@dataclass(frozen=True)
class Pointers:
    """Addresses of a block's first item."""
    x: Value
    y: Value | None
    old: Value              # h of the last step
    new: Value              # h of this step
    rest: Value             # the states other than h
    back: Value             # i1: this step takes the panels backwards, if they alternate


class RecurrenceEmitter:
    """Emitter of one kernel: the outer loops, and the micro-kernels that they call."""

    def __init__(self, kernel: RecurrenceTiling, module: Module, name: str, isa: Isa, tactic: Panels) -> None:
        problem = kernel.problem
        self.kernel, self.problem, self.isa, self.tactic, self.module, self.name = (
            kernel, problem, isa, tactic, module, name)
        self.items = kernel.tile_items(isa)
        self.block = 1 if problem.lengths is not None else BLOCK
        self.micro = MicroKernels(kernel, module, name, isa, tactic, self.block)

    # ---- outer loops
    def emit(self) -> None:
        problem = self.problem
        operands = len(problem.inputs) + 2 + len(problem.given) + len(problem.outputs)
        f, addresses, bounds = begin_kernel(self.module, self.name, operands)
        given = iter(addresses)
        self.x = next(given)
        every_item = View("float32", (len(problem.cells) * problem.hidden,), (4,), 0)
        self.first = {slot: (view, next(given)) for slot, view in enumerate(problem.first) if view}
        self.lengths = next(given) if problem.lengths else None
        weights, self.units = next(given), next(given)
        self.weights, crowded = weights + self.kernel.header(), problem.crowded
        self.crowded = (Crowded(weights, crowded or 0, self.kernel.crowded_offset) if self.kernel.rounds_to_bytes
                        else None)
        self.first |= {slot: (every_item, next(given)) for slot in problem.given}
        self.y = next(given) if problem.y else None
        self.last = [next(given) if view else None for view in problem.last]
        states = 1 + max(cell.states for cell in problem.cells)
        self.memory = f.op(PTR, f"alloca [{states * self.micro.area} x i8], align {ALIGNMENT}", "states")
        self._allocate(f)
        for start in f.range("block", bounds[0], bounds[1], self.block):
            count = (bounds[1] - start).at_most(self.block)
            for d in range(len(problem.cells)):
                if len(problem.cells) == 1:
                    self._direction(f, d, start, count)
                    continue
                with f.when(bounds[2].below(d + 1)), f.when(bounds[3].compare("ugt", d)):
                    self._direction(f, d, start, count)

    def _allocate(self, f: Function) -> None:
        """Allocate further memory on the stack."""

    def _direction(self, f: Function, d: int, start: Value, count: Value) -> None:
        """Run one cell over the whole sequence of the block's `count` items, from item `start` on."""
        problem, micro, cell = self.problem, self.micro, self.problem.cells[d]
        f.write(f"; direction {d}")
        for buffer in range(1 + cell.states):
            for offset in f.range("clear", count.like(0), count * micro.pitch, self.isa.bytes):
                f.store(f.constant(0, self.isa.floats), self.memory + (offset + buffer * micro.area), self.isa.bytes)
        for item in f.range("item", count.like(0), count):
            if micro.stored and micro.stored.zero:
                self._clear_integers(f, self.memory + item * micro.pitch + micro.integers, micro.stored.zero)
            for slot in self.first:
                self._load_first(f, d, slot, start + item, item)
        x = self.x + start * problem.gates.item + d * cell.gates * problem.hidden * problem.gates.strides[1]
        y = None
        if self.y is not None and problem.y is not None:
            y = self.y + start * problem.y.item + d * problem.hidden * problem.y.strides[1]
        steps: Value | int = problem.steps
        if self.lengths is not None and problem.lengths is not None:
            length = f.load(I32, self.lengths + start * problem.lengths.item, hint="length")
            steps = f.cast("zext", length, I64, "length").at_most(problem.steps)
        h = self._walk(f, d, x, y, count, steps)
        if y is not None and isinstance(steps, Value):
            self._clear_rest(f, y, steps)
        for item in f.range("item", count.like(0), count):
            for slot, view in enumerate(problem.last):
                if view is not None:
                    state = self.memory + (1 + slot) * micro.area if slot else h
                    self._store_last(f, d, slot, view, start + item, state + item * micro.pitch)

    def _walk(self, f: Function, d: int, x: Value, y: Value | None, count: Value, steps: Value | int) -> Value:
        """Run the steps in their order, and return the address of the last h. x and y: addresses of step 0."""
        problem, micro = self.problem, self.micro
        moves = {"x": problem.gates.strides[0]}
        at = {"x": x, "old": self.memory, "new": self.memory + micro.area}
        if y is not None and problem.y is not None:
            moves["y"], at["y"] = problem.y.strides[0], y
        if problem.backwards[d]:
            final = count.like(steps) - 1
            at |= {key: at[key] + final * move for key, move in moves.items()}
            moves = {key: -move for key, move in moves.items()}
        known = not isinstance(steps, Value)
        turns = f.loop("time", steps, at=at) if known else f.range("time", count.like(0), count.like(steps), at=at)
        for turn in turns:
            here = Pointers(at["x"], at.get("y"), at["old"], at["new"], self.memory + 2 * micro.area,
                             turn.binary("and", 1).compare("ne", 0))
            if problem.rounds:
                for item in f.range("item", count.like(0), count):
                    state = here.old + item * micro.pitch
                    round_state(f, self.isa, problem.hidden, state, state + micro.integers, state + micro.numbers,
                                self.crowded)
            for number in range(len(problem.cells[d].stages)):
                self._stage(f, d, number, here, count)
            at |= {key: at[key] + move for key, move in moves.items()}
            at["old"], at["new"] = at["new"], at["old"]
        return at["old"]

    def _clear_integers(self, f: Function, state: Value, zero: int) -> None:
        """Set a state in integers to its zero point."""
        for at, _ in f.tiles("zero", self.kernel.state_elements(self.isa), self.isa.lanes):
            f.store(f.constant(zero, vector(self.isa.lanes, I8)), state + at, self.isa.lanes)

    def _load_first(self, f: Function, d: int, slot: int, item: Value, position: Value) -> None:
        view, source = self.first[slot]
        source += item * view.item + d * self.problem.hidden * view.strides[0]
        target = self.memory + (1 + slot if slot else 0) * self.micro.area + position * self.micro.pitch
        for unit, count in f.tiles("unit", self.problem.hidden, self.isa.lanes):
            value, = load_channels(self.micro.lanes(count), view, source + unit * view.strides[0])
            f.store(value, target + unit * 4, self.isa.bytes)

    def _store_last(self, f: Function, d: int, slot: int, view: View, item: Value, state: Value) -> None:
        target = self.last[slot]
        assert target is not None
        target += item * view.item + d * self.problem.hidden * view.strides[0]
        for unit, count in f.tiles("unit", self.problem.hidden, self.isa.lanes):
            value = f.load(self.isa.floats, state + unit * 4, self.isa.bytes, "state")
            store_channels(self.micro.lanes(count), view, [[value]], [target + unit * view.strides[0]])

    def _clear_rest(self, f: Function, y: Value, length: Value) -> None:
        """Store the outputs of steps past the length of an item."""
        view = self.problem.y
        assert view is not None
        for t in f.range("behind", length, length.like(self.problem.steps)):
            for unit, count in f.tiles("unit", self.problem.hidden, self.isa.lanes):
                self.micro.store_y(f.constant(0, self.isa.floats), count,
                                   y + t * view.strides[0] + unit * view.strides[1])

    # ---- a stage of a step
    def _stage(self, f: Function, d: int, number: int, here: Pointers, count: Value) -> None:
        """Emit a stage by the largest tile that `count` items fill, which decides the width of a panel."""
        if self.items == 1 or self.block == 1:
            self._panels(f, d, number, here, 1, count)
            return
        sizes = [self.items, *(size for size in TAILS if size < self.items)]
        with f.when(count.compare("uge", sizes[0])):
            self._panels(f, d, number, here, sizes[0], count)
        for above, size in pairwise(sizes):
            with f.when((count - size).below(above - size)):
                self._panels(f, d, number, here, size, count)

    def _panels(self, f: Function, d: int, number: int, here: Pointers, size: int, count: Value) -> None:
        """Emit all units over tiles of up to `size` items; a panel's weights stay in cache for all tiles."""
        kernel, cell = self.kernel, self.problem.cells[d]
        stage = cell.stages[number]
        step = kernel.vectors(self.isa, self.tactic, stage, size) * self.isa.lanes
        for start, width in self._tiles_of_units(f, here, step):
            weights, units = self._constants(d, number, start)
            following = weights + -(-width // self.isa.lanes) * kernel.stage_vector(self.isa, stage)
            for item, tile in tiles_of_items(f, size, count):
                ahead = following + item.divided(size) * (kernel.turns() * LINE)
                name = self.micro.write(self.problem.cells.index(cell), number, tile, width)
                f.run(name, *self._addresses(here, item, start), weights, units, start, ahead)

    def _tiles_of_units(self, f: Function, here: Pointers, step: int) -> Iterator[tuple[Value, int]]:
        """Yield (start, size) of the panels of a stage."""
        if self.tactic.alternate:
            return there_and_back(f, self.problem.hidden, step, here.back)
        return f.tiles("units", self.problem.hidden, step)

    def _constants(self, d: int, number: int, start: Value) -> tuple[Value, Value]:
        """Return the addresses of the weights and of the constants of units from `start` on."""
        kernel, problem, isa, cell = self.kernel, self.problem, self.isa, self.problem.cells[d]
        vectors, panel = -(-problem.hidden // isa.lanes), start.divided(isa.lanes)
        before = sum(vectors * kernel.stage_vector(isa, s) for c in problem.cells[:d] for s in c.stages)
        before += sum(vectors * kernel.stage_vector(isa, s) for s in cell.stages[:number])
        unit_vector = (cell.units + kernel.scales) * isa.bytes
        return (self.weights + before + panel * kernel.stage_vector(isa, cell.stages[number]),
                self.units + d * vectors * unit_vector + panel * unit_vector)

    def _addresses(self, here: Pointers, item: Value, start: Value) -> list[Value]:
        """Return a micro-kernel's addresses x, old, new, rest and y."""
        problem, at = self.problem, item * self.micro.pitch
        addresses = [here.x + item * problem.gates.item + start * problem.gates.strides[1],
                     here.old + at, here.new + at, here.rest + at]
        if here.y is not None and problem.y is not None:
            addresses.append(here.y + item * problem.y.item + start * problem.y.strides[1])
        return addresses
