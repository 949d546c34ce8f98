"""Micro-kernels of a Recurrence: for some items and units of a stage, the products in registers, then the updates.

They also define the layout of the states in scratch: for each item h or another state in floats, then its integers if
products read those, then the numbers of rounding.py if the scale is found at run time.
"""
from __future__ import annotations

from typing import Any, ClassVar

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import hidden
from infer_server.engines.backends.llvm.kernels.common.arithmetic import Operand
from infer_server.engines.backends.llvm.kernels.common.pixels import load_channels, store_channels
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT
from infer_server.engines.backends.llvm.kernels.recurrent.rounding import NUMBERS, load_shift, load_unit
from infer_server.engines.backends.llvm.kernels.recurrent.tiling import STEPS, Panels, RecurrenceTiling
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I8, I16, I64, PTR, vector
from infer_server.engines.lowering.problems.recurrence import Source, Stage
from infer_server.engines.lowering.problems.view import SIZES

STRANDS = 4             # units whose updates are interleaved
FEWEST_CHAINS = 8       # independent sums that hide the latency of an fma; if there are fewer, they are split
LINE = 64               # bytes of a cache line


class MicroKernels:
    """Micro-kernels of one kernel, each emitted once."""
    last_parameter: ClassVar[str] = "ahead"     # address of weights to prefetch

    def __init__(self, kernel: RecurrenceTiling, module: Module, name: str, isa: Isa, tactic: Panels,
                 block: int) -> None:
        """Make the emitter; block: items whose states are in scratch at the same time."""
        self.kernel, self.module, self.name, self.isa, self.tactic = kernel, module, name, isa, tactic
        self.problem, self.arithmetic = kernel.problem, kernel.arithmetic(isa)
        self.stored = kernel.stored(isa)
        self.integers = kernel.state_elements(isa) * 4            # byte offset of the state in integers
        self.numbers = self.integers + kernel.state_elements(isa) * SIZES[self.arithmetic.dtype]      # see rounding.py
        size = self.numbers if self.stored or self.problem.rounds else self.integers
        size += NUMBERS * self.problem.rounds
        self.pitch = -(-size // ALIGNMENT) * ALIGNMENT                      # bytes from item to item
        self.area = self.pitch * block                                      # bytes of a state of all items

    def lanes(self, count: int) -> Lanes:
        return Lanes(self.isa, count, packed=False)

    def write(self, which: int, number: int, size: int, width: int) -> str:
        """Return the name of the micro-kernel for `size` items by `width` units of a stage, emitted once."""
        name = f"{self.name}_{which}_{number}_{size}x{width}"
        if name in self.module.functions:
            return name
        problem, isa, stage = self.problem, self.isa, self.problem.cells[which].stages[number]
        y = {"y": PTR} if problem.y is not None else {}
        f = self.module.function(name, internal=True, x=PTR, old=PTR, new=PTR, rest=PTR, **y, w=PTR, units=PTR,
                                 start=I64, **{self.last_parameter: PTR})
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
        """Return {(item, gate's position in the stage, vector): sum over k of state * weight}."""
        kernel, isa, arithmetic = self.kernel, self.isa, self.arithmetic
        source = f.parameters["old"] if stage.source == 0 else f.parameters["rest"] + (stage.source - 1) * self.area
        keys = [(item, g, v) for v in range(vectors) for g in range(len(stage.gates)) for item in range(size)]
        split = next(n for n in (1, 2, STEPS) if n * len(keys) >= FEWEST_CHAINS or n == STEPS)
        if kernel.shares_weights and not arithmetic.exact:
            split = 1       # one order of summation in all tiles, so that an item's result does not depend on the batch
        acc = {(part, key): arithmetic.zero(isa, source) for part in range(split) for key in keys}
        state = source + (self.integers if arithmetic.exact else 0)
        at = {"s": state, "w": f.parameters["w"], "ahead": f.parameters["ahead"]}
        if kernel.head(isa):
            shifts = [load_shift(isa, source + (item * self.pitch + self.numbers))
                      for item in range(size * self.problem.rounds)]
            for item, g, v in keys:
                start_address = at["w"] + (v * kernel.stage_vector(isa, stage) + g * isa.bytes)
                start = f.load(isa.ints, start_address, isa.bytes, "start")
                acc[0, (item, g, v)] = start * shifts[item] if shifts else start
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
        """Add state * weight to acc for each pair of addresses. The side with fewer vectors stays in registers."""
        isa, arithmetic = self.isa, self.arithmetic

        def add(item: int, position: tuple[int, int], state: Operand, weight: Operand) -> None:
            key = part, (item, *position)
            acc[key] = arithmetic.dot(isa, acc[key], state, weight)

        if len(states) <= len(weights):
            pixels = {item: arithmetic.pixel(isa, address) for item, address in states.items()}
            for position, address in weights.items():
                # Opaque address; otherwise LLVM loads all weights at once, and the tile spills.
                weight = arithmetic.weights(isa, hidden(address) if len(pixels) > 1 else address)
                for item, pixel in pixels.items():
                    add(item, position, pixel, weight)
            return
        loaded = {position: arithmetic.weights(isa, address) for position, address in weights.items()}
        for item, address in states.items():
            pixel = arithmetic.pixel(isa, address)
            for position, weight in loaded.items():
                add(item, position, pixel, weight)

    def store_integers(self, integers: Value, state: Value, unit: Value) -> None:
        """Store the integers of a vector of units, from `unit` on, into those of a state."""
        size = SIZES[self.arithmetic.dtype]
        narrow = state.f.cast("trunc", integers, vector(self.isa.lanes, {1: I8, 2: I16}[size]), "integers")
        state.f.store(narrow, state + unit * size, size * self.isa.lanes)

    def store_y(self, value: Value, count: int, address: Value) -> None:
        """Run the program on h and store the result to y."""
        view = self.problem.y
        assert view is not None
        result = self.problem.program.run(self.isa, value, [], [value.like(number) for number in self.problem.numbers])
        store_channels(self.lanes(count), view, [[result]], [address])


class _Unit:
    """Update of a vector of units of one item.

    It loads the operands of updates after the products, and stores the new states.
    """

    def __init__(self, emitter: MicroKernels, f: Function, which: int, item: int, v: int, count: int,
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
            self.known[source] = self._load_operand(*source)
        return self.known[source]

    def _load_operand(self, kind: str, index: int) -> Value:
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
        return load_channels(e.lanes(self.count), problem.gates, address)[0]

    def _scale(self, gate: int) -> Value:
        """Return the factor that converts the integer sums of a gate to real numbers."""
        scale = self._constant(self.cell.units + gate)
        if not self.e.problem.rounds:
            return scale
        return scale * load_unit(self.e.isa, self.f.parameters["old"] + (self.item * self.e.pitch + self.e.numbers))

    def _constant(self, index: int) -> Value:
        isa, each = self.e.isa, self.cell.units + self.e.kernel.scales
        address = self.f.parameters["units"] + (self.v * each + index) * isa.bytes
        return self.f.load(isa.floats, address, isa.bytes, "constant")

    def _address(self, slot: int, h: str) -> Value:
        """Return the address of this vector of a state; h: which of its two buffers."""
        e, parameters = self.e, self.f.parameters
        base = parameters["rest"] + (slot - 1) * e.area if slot else parameters[h]
        return base + (self.item * e.pitch + self.v * e.isa.bytes) + parameters["start"] * 4

    def _store(self, slot: int, value: Value) -> None:
        e, f, isa, problem = self.e, self.f, self.e.isa, self.e.problem
        f.store(value, self._address(slot, "new"), isa.bytes)
        if e.stored and any(stage.source == slot for stage in self.cell.stages):
            integers = isa.round(value * e.stored.one) + e.stored.zero
            base = f.parameters["rest"] + (slot - 1) * e.area if slot else f.parameters["new"]
            e.store_integers(integers, base + (self.item * e.pitch + e.integers),
                             f.parameters["start"] + self.v * isa.lanes)
        if slot == 0 and problem.y is not None:
            unit = self.v * isa.lanes * problem.y.strides[1]
            e.store_y(value, self.count, f.parameters["y"] + (self.item * problem.y.item + unit))
