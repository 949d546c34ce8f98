"""The code of a Recurrence: cells from step to step, their products in registers (recurrence.py says how it lies).

    for direction: for block of items:             the states of the block stay in scratch on the stack
      for t in time:
        for stage of the cell:                     see problems/recurrence.py
          for panel of units: for tile of items:   a call of the micro-kernel:
            for k in units:
              sum[item, gate, unit] += state[item, k] * R[gate, unit, k]         all in registers
            the updates of the stage; h goes to y

h has two buffers that change places after each step, so the units of a step may be computed one after the other, in any
order. What takes the time of large layers is reading R in every step. So each panel's weights are read once for all
items of the block; K may be read at several places at once, for a core has more lines of far memory under way if they
belong to several streams; and every other step may take the panels backwards, to begin with what is still in a cache.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.common.access import TAILS, hidden, tails
from engines.backends.llvm.kernels.common.arithmetic import Operand
from engines.backends.llvm.kernels.common.pixels import load_channels, store_channels
from engines.backends.llvm.kernels.kernel import ALIGNMENT, begin_kernel
from engines.backends.llvm.kernels.recurrent.rounding import load_unit, round_state
from engines.backends.llvm.kernels.recurrent.tiling import BLOCK, STEPS, Panels, RecurrenceTiling
from engines.codegen.ir_builder import Function, Module, Value
from engines.codegen.types import I8, I16, I32, I64, PTR, vector
from engines.lowering.problems.recurrence import Source, Stage
from engines.lowering.problems.view import SIZES, View

STRANDS = 4             # units whose updates are written in turns
FEWEST_CHAINS = 8       # sums that must be under way at once to hide an fma's latency; fewer are split
LINE = 64               # bytes of a cache line


@dataclass(frozen=True)
class _Pointers:
    """What a block's items are reached by; of the first item."""
    x: Value
    y: Value | None
    old: Value              # h of the last step ...
    new: Value              # ... and of this one
    rest: Value             # the other states
    back: Value             # an i1: where panels alternate, those of this step go backwards


class RecurrenceEmitter:
    """Writes one kernel: the loops around, and the micro-kernels they call."""

    def __init__(self, kernel: RecurrenceTiling, module: Module, name: str, isa: Isa, tactic: Panels) -> None:
        problem = kernel.problem
        self.kernel, self.problem, self.isa, self.tactic, self.module, self.name = (
            kernel, problem, isa, tactic, module, name)
        self.arithmetic, self.items = kernel.arithmetic(isa), kernel.tile_items(isa)
        self.block = 1 if problem.lengths is not None else BLOCK
        self.stored = kernel.stored(isa)
        self.integers = kernel.room(isa) * 4            # where the state in integers follows
        self.unit = self.integers + kernel.room(isa) * SIZES[self.arithmetic.dtype]     # where what 1 of them means is
        size = self.unit + 4 if problem.rounds else self.unit if self.stored else self.integers
        self.pitch = -(-size // ALIGNMENT) * ALIGNMENT                      # bytes from item to item
        self.area = self.pitch * self.block                                 # of a state of all items

    # ---- the loops around
    def emit(self) -> None:
        problem = self.problem
        operands = len(problem.inputs) + 2 + len(problem.given) + len(problem.outputs)
        f, addresses, bounds = begin_kernel(self.module, self.name, operands)
        given = iter(addresses)
        self.x = next(given)
        every_item = View("float32", (len(problem.cells) * problem.hidden,), (4,), 0)
        self.first = {slot: (view, next(given)) for slot, view in enumerate(problem.first) if view}
        self.lengths = next(given) if problem.lengths else None
        self.weights, self.units = next(given), next(given)
        self.first |= {slot: (every_item, next(given)) for slot in problem.given}
        self.y = next(given) if problem.y else None
        self.last = [next(given) if view else None for view in problem.last]
        states = 1 + max(cell.states for cell in problem.cells)
        self.memory = f.op(PTR, f"alloca [{states * self.area} x i8], align {ALIGNMENT}", "states")
        for start in f.range("block", bounds[0], bounds[1], self.block):
            count = (bounds[1] - start).at_most(self.block)
            for d in range(len(problem.cells)):
                if len(problem.cells) == 1:
                    self._direction(f, d, start, count)
                    continue
                with f.when(bounds[2].below(d + 1)), f.when(bounds[3].compare("ugt", d)):
                    self._direction(f, d, start, count)

    def _direction(self, f: Function, d: int, start: Value, count: Value) -> None:
        """One cell over the whole sequence of the block's `count` items, from item `start` on."""
        problem, cell = self.problem, self.problem.cells[d]
        f.write(f"; direction {d}")
        for at, _ in f.tiles("clear", (1 + cell.states) * self.area, self.isa.bytes):
            f.store(f.constant(0, self.isa.floats), self.memory + at, self.isa.bytes)
        for item in f.range("item", count.like(0), count):
            if self.stored and self.stored.zero:
                self._clear_integers(f, self.memory + item * self.pitch + self.integers, self.stored.zero)
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
            self._clear_behind(f, y, steps)
        for item in f.range("item", count.like(0), count):
            for slot, view in enumerate(problem.last):
                if view is not None:
                    state = self.memory + (1 + slot) * self.area if slot else h
                    self._store_last(f, d, slot, view, start + item, state + item * self.pitch)

    def _walk(self, f: Function, d: int, x: Value, y: Value | None, count: Value, steps: Value | int) -> Value:
        """The steps in their order; where the last h is. x and y: of step 0."""
        problem = self.problem
        moves = {"x": problem.gates.strides[0]}
        at = {"x": x, "old": self.memory, "new": self.memory + self.area}
        if y is not None and problem.y is not None:
            moves["y"], at["y"] = problem.y.strides[0], y
        if problem.backwards[d]:
            final = count.like(steps) - 1
            at |= {key: at[key] + final * move for key, move in moves.items()}
            moves = {key: -move for key, move in moves.items()}
        known = not isinstance(steps, Value)
        turns = f.loop("time", steps, at=at) if known else f.range("time", count.like(0), count.like(steps), at=at)
        for turn in turns:
            here = _Pointers(at["x"], at.get("y"), at["old"], at["new"], self.memory + 2 * self.area,
                             turn.binary("and", 1).compare("ne", 0))
            if problem.rounds:
                for item in f.range("item", count.like(0), count):
                    state = here.old + item * self.pitch
                    round_state(f, self.isa, problem.hidden, state, state + self.integers, state + self.unit)
            for number in range(len(problem.cells[d].stages)):
                self._stage(f, d, number, here, count)
            at |= {key: at[key] + move for key, move in moves.items()}
            at["old"], at["new"] = at["new"], at["old"]
        return at["old"]

    def _clear_integers(self, f: Function, state: Value, zero: int) -> None:
        """Zeros in integers, where they are not the integer 0."""
        for at, _ in f.tiles("zero", self.kernel.room(self.isa), self.isa.lanes):
            f.store(f.constant(zero, vector(self.isa.lanes, I8)), state + at, self.isa.lanes)

    def _load_first(self, f: Function, d: int, slot: int, item: Value, place: Value) -> None:
        view, source = self.first[slot]
        source += item * view.item + d * self.problem.hidden * view.strides[0]
        target = self.memory + (1 + slot if slot else 0) * self.area + place * self.pitch
        for unit, count in f.tiles("unit", self.problem.hidden, self.isa.lanes):
            value, = load_channels(self._lanes(count), view, source + unit * view.strides[0])
            f.store(value, target + unit * 4, self.isa.bytes)

    def _store_last(self, f: Function, d: int, slot: int, view: View, item: Value, state: Value) -> None:
        target = self.last[slot]
        assert target is not None
        target += item * view.item + d * self.problem.hidden * view.strides[0]
        for unit, count in f.tiles("unit", self.problem.hidden, self.isa.lanes):
            value = f.load(self.isa.floats, state + unit * 4, self.isa.bytes, "state")
            store_channels(self._lanes(count), view, [[value]], [target + unit * view.strides[0]])

    def _clear_behind(self, f: Function, y: Value, length: Value) -> None:
        """What y holds where an item has no step."""
        view = self.problem.y
        assert view is not None
        for t in f.range("behind", length, length.like(self.problem.steps)):
            for unit, count in f.tiles("unit", self.problem.hidden, self.isa.lanes):
                self._store_y(f.constant(0, self.isa.floats), count, y + t * view.strides[0] + unit * view.strides[1])

    def _lanes(self, count: int) -> Lanes:
        return Lanes(self.isa, count, packed=False)

    # ---- a stage of a step
    def _stage(self, f: Function, d: int, number: int, here: _Pointers, count: Value) -> None:
        """By the largest tile that `count` items fill, which decides how wide a panel is."""
        if self.items == 1 or self.block == 1:
            self._panels(f, d, number, here, 1, count)
            return
        sizes = [self.items, *(size for size in TAILS if size < self.items)]
        with f.when(count.compare("uge", sizes[0])):
            self._panels(f, d, number, here, sizes[0], count)
        for above, size in pairwise(sizes):
            with f.when((count - size).below(above - size)):
                self._panels(f, d, number, here, size, count)

    def _panels(self, f: Function, d: int, number: int, here: _Pointers, size: int, count: Value) -> None:
        """The units, over tiles of up to `size` items: a panel's weights stay in cache while the tiles pass."""
        kernel, problem, isa, cell = self.kernel, self.problem, self.isa, self.problem.cells[d]
        stage, vectors = cell.stages[number], -(-problem.hidden // isa.lanes)
        before = sum(vectors * kernel.stage_vector(isa, s) for c in problem.cells[:d] for s in c.stages)
        before += sum(vectors * kernel.stage_vector(isa, s) for s in cell.stages[:number])
        unit_vector = (cell.units + kernel.scales) * isa.bytes
        step = kernel.vectors(isa, self.tactic, stage, size) * isa.lanes
        tiles = _there_and_back(f, problem.hidden, step, here.back) if self.tactic.alternate else \
            f.tiles("units", problem.hidden, step)
        for start, width in tiles:
            panel = start.divided(isa.lanes)
            weights = self.weights + before + panel * kernel.stage_vector(isa, stage)
            units = self.units + d * vectors * unit_vector + panel * unit_vector
            following = weights + -(-width // isa.lanes) * kernel.stage_vector(isa, stage)
            for item, tile in _tiles(f, size, count):
                at = item * self.pitch
                ahead = following + item.divided(size) * (kernel.turns() * LINE)
                pointers = {"x": here.x + item * problem.gates.item + start * problem.gates.strides[1],
                            "old": here.old + at, "new": here.new + at, "rest": here.rest + at}
                if here.y is not None and problem.y is not None:
                    pointers["y"] = here.y + item * problem.y.item + start * problem.y.strides[1]
                name = self._microkernel(problem.cells.index(cell), number, tile, width)
                f.run(name, *pointers.values(), weights, units, start, ahead)

    # ---- the micro-kernel
    def _microkernel(self, which: int, number: int, size: int, width: int) -> str:
        """`size` items by `width` units of a stage; its name."""
        name = f"{self.name}_{which}_{number}_{size}x{width}"
        if name in self.module.functions:
            return name
        problem, isa, stage = self.problem, self.isa, self.problem.cells[which].stages[number]
        y = {"y": PTR} if problem.y is not None else {}
        f = self.module.function(name, internal=True, x=PTR, old=PTR, new=PTR, rest=PTR, **y, w=PTR, units=PTR,
                                 start=I64, ahead=PTR)
        vectors = -(-width // isa.lanes)
        sums = self._products(f, stage, size, vectors)
        with f.interleaved(STRANDS) as begin:
            for item in range(size):
                for v in range(vectors):
                    begin()
                    own = {gate: sums[item, g, v] for g, gate in enumerate(stage.gates)}
                    _Unit(self, f, which, item, v, min(isa.lanes, width - v * isa.lanes), own).update(stage)
        return name

    def _products(self, f: Function, stage: Stage, size: int, vectors: int) -> dict[tuple[int, int, int], Value]:
        """{(item, gate's place in the stage, vector): sum over k of state * weight}"""
        kernel, isa, arithmetic = self.kernel, self.isa, self.arithmetic
        source = f.parameters["old"] if stage.source == 0 else f.parameters["rest"] + (stage.source - 1) * self.area
        keys = [(item, g, v) for v in range(vectors) for g in range(len(stage.gates)) for item in range(size)]
        split = next(n for n in (1, 2, STEPS) if n * len(keys) >= FEWEST_CHAINS or n == STEPS)
        if kernel.by_batch and not arithmetic.exact:
            split = 1       # floats are summed in one order in all tiles: an item's do not depend on its neighbours
        acc = {(part, key): arithmetic.zero(isa, source) for part in range(split) for key in keys}
        state = source + (self.integers if arithmetic.exact else 0)
        at = {"s": state, "w": f.parameters["w"], "ahead": f.parameters["ahead"]}
        if kernel.head(isa):
            for item, g, v in keys:
                start = at["w"] + (v * kernel.stage_vector(isa, stage) + g * isa.bytes)
                acc[0, (item, g, v)] = f.load(isa.ints, start, isa.bytes, "start")
            at["w"] += len(stage.gates) * isa.bytes
        step, weight = arithmetic.step_bytes, arithmetic.weight_bytes(isa)
        places = self.tactic.places
        parts, apart = max(split, places), kernel.turns() // places
        for _ in f.loop("k", kernel.turns() // parts, acc=acc, at=at):
            for part in range(parts):
                k = part % places * apart + part // places
                states = {item: at["s"] + item * self.pitch + k * step for item in range(size)}
                weights = {(g, v): at["w"] + v * kernel.stage_vector(isa, stage) + (k * len(stage.gates) + g) * weight
                           for v in range(vectors) for g in range(len(stage.gates))}
                self._outer_product(acc, part % split, states, weights)
                if self.tactic.prefetch:
                    isa.prefetch(at["ahead"])
                    at["ahead"] += LINE
            at["s"] += parts // places * step
            at["w"] += parts // places * len(stage.gates) * weight
        while split > 1:
            split //= 2
            for part in range(split):
                for key in keys:
                    acc[part, key] += acc[part + split, key]
        return {key: arithmetic.finish(isa, acc[0, key]) for key in keys}

    def _outer_product(self, acc: dict[Any, Value], part: int, states: dict[int, Value],
                       weights: dict[tuple[int, int], Value]) -> None:
        """acc += state * weight for each pair, given addresses. The shorter side waits in registers."""
        isa, arithmetic = self.isa, self.arithmetic

        def add(item: int, place: tuple[int, int], state: Operand, weight: Operand) -> None:
            key = part, (item, *place)
            acc[key] = arithmetic.dot(isa, acc[key], state, weight)

        if len(states) <= len(weights):
            pixels = {item: arithmetic.pixel(isa, address) for item, address in states.items()}
            for place, address in weights.items():
                # Hidden, or LLVM loads all weights at once, and the tile spills.
                weight = arithmetic.weights(isa, hidden(address) if len(pixels) > 1 else address)
                for item, pixel in pixels.items():
                    add(item, place, pixel, weight)
            return
        loaded = {place: arithmetic.weights(isa, address) for place, address in weights.items()}
        for item, address in states.items():
            pixel = arithmetic.pixel(isa, address)
            for place, weight in loaded.items():
                add(item, place, pixel, weight)

    def _store_y(self, value: Value, count: int, address: Value) -> None:
        """h to y."""
        view = self.problem.y
        assert view is not None
        result = self.problem.program.run(self.isa, value, [], [value.like(number) for number in self.problem.numbers])
        store_channels(self._lanes(count), view, [[result]], [address])


def _there_and_back(f: Function, extent: int, step: int, back: Value) -> Iterator[tuple[Value, int]]:
    """(start, size) of tiles of 0..extent-1, as Function.tiles has them; if `back`, from the last to the first."""
    whole, tail = divmod(extent, step)
    last = f.constant(extent - tail, I64), tail
    if tail:
        with f.when(back):
            yield last
    if whole:
        for i in f.loop("units", whole):
            yield f.select(back, whole - 1 - i, i) * step, step
    if tail:
        with f.when(back.compare("eq", 0)):
            yield last


def _tiles(f: Function, size: int, count: Value) -> Iterator[tuple[Value, int]]:
    """(first item, items) of the tiles of `count` items: full ones, then one of 4, 2, 1 for each bit of the rest."""
    whole = count.divided(size)
    for item in f.range("tile", count.like(0), whole * size, size):
        yield item, size
    yield from tails(whole, count.remainder(size), size)


class _Unit:
    """A vector of units of one item after the products: finds what updates read, stores what they make."""

    def __init__(self, emitter: RecurrenceEmitter, f: Function, which: int, item: int, v: int, count: int,
                 sums: dict[int, Value]) -> None:
        self.e, self.f, self.item, self.v, self.count, self.sums = emitter, f, item, v, count, sums
        self.cell = emitter.problem.cells[which]
        self.known: dict[Source, Value] = {}

    def update(self, stage: Stage) -> None:
        for update in stage.updates:
            operands = [self.find(source) for source in update.operands]
            numbers = [operands[0].like(number) for number in update.numbers]
            value = update.program.run(self.e.isa, None, operands, numbers)
            if update.slot:
                self.known["state", update.slot] = value
            self._store(update.slot, value)

    def find(self, source: Source) -> Value:
        if source not in self.known:
            self.known[source] = self._found(*source)
        return self.known[source]

    def _found(self, kind: str, index: int) -> Value:
        e, problem, isa, parameters = self.e, self.e.problem, self.e.isa, self.f.parameters
        scales = e.kernel.scales
        if kind == "gate" and scales:
            return isa.fma(self.sums[index], self._scale(index), self.find(("x", index)))
        if kind == "gate":
            return self.sums[index] + self.find(("x", index))
        if kind == "sum":
            total = self.sums[index]
            return total * self._scale(index) if scales else total
        if kind == "unit":
            return self._constant(index)
        if kind == "state":
            return self.f.load(isa.floats, self._address(index, "old"), isa.bytes, f"state {index}")
        unit = index * problem.hidden + self.v * isa.lanes
        address = parameters["x"] + (self.item * problem.gates.item + unit * problem.gates.strides[1])
        return load_channels(e._lanes(self.count), problem.gates, address)[0]

    def _scale(self, gate: int) -> Value:
        """What makes real numbers of a gate's integer sums."""
        scale = self._constant(self.cell.units + gate)
        if not self.e.problem.rounds:
            return scale
        return scale * load_unit(self.e.isa, self.f.parameters["old"] + (self.item * self.e.pitch + self.e.unit))

    def _constant(self, index: int) -> Value:
        isa, each = self.e.isa, self.cell.units + self.e.kernel.scales
        place = self.f.parameters["units"] + (self.v * each + index) * isa.bytes
        return self.f.load(isa.floats, place, isa.bytes, "constant")

    def _address(self, slot: int, h: str) -> Value:
        """Of this vector of a state; h: which of its two buffers."""
        e, parameters = self.e, self.f.parameters
        base = parameters["rest"] + (slot - 1) * e.area if slot else parameters[h]
        return base + (self.item * e.pitch + self.v * e.isa.bytes) + parameters["start"] * 4

    def _store(self, slot: int, value: Value) -> None:
        e, f, isa, problem = self.e, self.f, self.e.isa, self.e.problem
        f.store(value, self._address(slot, "new"), isa.bytes)
        if e.stored and any(stage.source == slot for stage in self.cell.stages):
            size = SIZES[e.arithmetic.dtype]
            integers = isa.round(value * e.stored.one) + e.stored.zero
            narrow = f.cast("trunc", integers, vector(isa.lanes, {1: I8, 2: I16}[size]), "integers")
            base = f.parameters["rest"] + (slot - 1) * e.area if slot else f.parameters["new"]
            at = base + (self.item * e.pitch + e.integers + self.v * isa.lanes * size) + f.parameters["start"] * size
            f.store(narrow, at, size * isa.lanes)
        if slot == 0 and problem.y is not None:
            unit = self.v * isa.lanes * problem.y.strides[1]
            e._store_y(value, self.count, f.parameters["y"] + (self.item * problem.y.item + unit))
