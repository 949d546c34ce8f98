"""Emit the loops of a nest, and each operation of its program inside the loops that it depends on.

    outer loops, the vectorised one last        (an unrolled one: several neighbours per iteration)
        for each pass: inner loops; operations; accumulators
        inner loops once more, if results are stored inside

An operation is emitted as soon as all loops that it depends on have begun, so that no other loop repeats it. If the
vectorised loop has several vectors, or a loop is unrolled, an operation has a copy for each that it depends on: a
matrix product then reuses its loads.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.loops import repeat
from infer_server.engines.codegen.nest.order import NONE, Loops
from infer_server.engines.codegen.nest.values import (
    COMBINED,
    LaneValue,
    Ramp,
    better,
    compared,
    computed,
    gathered,
    identity,
    is_vector,
    load,
    multiplied,
    number,
    plain,
    scattered,
    spread,
    store,
)
from infer_server.engines.codegen.types import I1, I64, vector
from infer_server.engines.codegen.words import Primitives
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.nest.program import FLOATING

Copy = tuple[int, int]          # (number of the unrolled neighbour, number of the vector)
Parts = Iterator[tuple[Value, int]]


@dataclass(frozen=True)
class LoopState:
    """State at a point of the code: the loops that have begun, and the values computed in them."""
    at: tuple[Value, ...]                                   # address of each source at the current indices
    bases: tuple[Value, ...]                                # address of each source's first element in this item
    indices: dict[int, Value]
    values: dict[tuple[int, Copy], LaneValue] = field(default_factory=dict)
    phase: int = 0
    neighbours: int = 1
    counts: tuple[int, ...] = (1,)                          # active lanes of each vector

    def copies(self) -> list[Copy]:
        return [(row, part) for row in range(self.neighbours) for part in range(len(self.counts))]


@dataclass(frozen=True)
class ElementAddresses:
    """Address of `count` elements: `step` bytes apart from `base`, or each at its own in `addresses`."""
    base: Value
    step: int
    count: int
    addresses: Sequence[Value] | None = None

    def load(self, machine: Primitives, dtype: str) -> Value:
        if self.addresses is None:
            return load(machine, dtype, self.base, self.step, self.count)
        return gathered(machine, dtype, self.addresses)

    def store(self, machine: Primitives, dtype: str, value: LaneValue) -> None:
        if self.addresses is None:
            store(machine, dtype, value, self.base, self.step, self.count)
        else:
            scattered(machine, dtype, value, self.addresses)


Body = Callable[[LoopState], None]


class Code:
    """Emitter of a nest's loops into a function."""

    def __init__(self, f: Function, machine: Primitives, loops: Loops) -> None:
        self.f, self.machine, self.loops = f, machine, loops

    # ---- loops
    def enter(self, frame: LoopState, loop: int, index: Value, size: int, required: Collection[int]) -> LoopState:
        """Return the frame inside `size` iterations of a loop, with the required operations that can run there."""
        at = tuple(address + index * view.strides[loop] if loop < len(view.strides) and self._is_read[i] else address
                   for i, (address, view) in enumerate(zip(frame.at, self.loops.sources, strict=True)))
        frame = replace(frame, at=at, indices={**frame.indices, loop: index}, values=dict(frame.values))
        if loop == self.loops.cut.lanes:
            lanes = self.machine.lanes
            counts = tuple(min(lanes, size - start) for start in range(0, size, lanes))
            frame = replace(frame, counts=counts)
        elif loop == self.loops.cut.rows:
            frame = replace(frame, neighbours=size)
        self.fill(frame, required)
        return frame

    def fill(self, frame: LoopState, required: Collection[int]) -> None:
        """Emit the required operations that can be computed here and have not been emitted."""
        for one in sorted(required):
            ready = self.loops.depends[one] <= frame.indices.keys() and self.loops.phases[one] <= frame.phase
            if ready and self.loops.program.operations[one].op != "reduce" and one not in self._fused:
                if self.loops.program.operations[one].op == "phi" and self.key(one, (0, 0)) not in frame.values:
                    self._cycle(frame, int(self.loops.program.operations[one].what or 0))
                for copy in frame.copies():
                    key = self.key(one, copy)
                    if key not in frame.values:
                        frame.values[key] = self._value(frame, one, copy)

    def _cycle(self, frame: LoopState, number_: int) -> None:
        """Emit all operations of a cycle as one loop, in which all lanes and copies repeat together."""
        program, cycle = self.loops.program, self.loops.program.cycles[number_]
        whole = spread if self.loops.cut.lanes in self.loops.depends[cycle.phis[0]] else plain
        self.fill(frame, program.needed(cycle.exits).difference(cycle.phis, cycle.body, cycle.exits))

        def values(operations: Iterable[int]) -> dict[Any, Value]:
            return {self.key(phi, copy): whole(self.machine, self.value_at(frame, one, copy))
                    for phi, one in zip(cycle.phis, operations, strict=True) for copy in frame.copies()}

        state = values(program.operations[phi].args[0] for phi in cycle.phis)
        for tests in repeat(self.f, f"cycle {number_}", state):
            frame.values.update(state)
            self.fill(frame, set(cycle.body))
            state.update(values(cycle.steps))
            again = {self.key(cycle.test, copy): self.value_at(frame, cycle.test, copy) for copy in frame.copies()}
            tests += [plain(self.machine, test) for test in again.values()]

    def over(self, frame: LoopState, order: Sequence[int], required: Collection[int], body: Body,
             acc: dict[object, Value] | None = None, bounds: tuple[Value, Value] | None = None) -> None:
        """Emit nested loops around a body; bounds: run-time bounds of the first loop."""
        if not order:
            body(frame)
            return
        loop, *rest = order
        for start, size in self._parts(loop, acc, bounds):
            self.over(self.enter(frame, loop, start, size, required), rest, required, body, acc)

    def _parts(self, loop: int, acc: dict[object, Value] | None, bounds: tuple[Value, Value] | None) -> Parts:
        """Yield the tiles of a loop. acc: its accumulators, or None if it has none and may be cut in any way."""
        extent, step = self.loops.extents[loop], self.loops.width(self.machine.lanes, loop)
        if acc is not None:
            yield from self.f.tiles(f"loop {loop}", extent, step, acc=acc)
        elif bounds is None:
            yield from self.f.tiles(f"loop {loop}", extent, step, split_tail=True)
        else:
            tail = extent % step
            for start in self.f.range(f"loop {loop}", bounds[0], bounds[1].at_most(extent - tail), step):
                yield start, step
            if isinstance(tail, SymbolicInt) or tail:
                with self.f.when(bounds[1].compare("uge", extent)):
                    yield from self.f.tail(extent, step)

    # ---- operations
    def key(self, one: int, copy: Copy) -> tuple[int, Copy]:
        """Return the key of a value; copies for which an operation is equal share one."""
        cut, depends = self.loops.cut, self.loops.depends[one]
        return one, (copy[0] if cut.rows in depends else 0, copy[1] if cut.lanes in depends else 0)

    def value_at(self, frame: LoopState, one: int, copy: Copy) -> LaneValue:
        return frame.values[self.key(one, copy)]

    @cached_property
    def _fused(self) -> set[int]:
        """Return the float products that only feed one sum: each is emitted as a multiply-add with that sum."""
        program, readers = self.loops.program, dict[int, list[str]]()
        for one in program.operations:
            for arg in one.args:
                readers.setdefault(arg, []).append(f"{one.op} {one.what}")
        return {i for i, one in enumerate(program.operations)
                if one.op == "mul" and one.kind in FLOATING and readers.get(i) == ["reduce sum"]
                and i not in program.results}

    @cached_property
    def _is_read(self) -> list[bool]:
        read = {one.what for one in self.loops.program.operations if one.op == "read"}
        return [source in read for source in range(len(self.loops.sources))]

    def _value(self, frame: LoopState, number_: int, copy: Copy) -> LaneValue:
        one, cut = self.loops.program.operations[number_], self.loops.cut
        varies = cut.lanes in self.loops.depends[number_]
        if one.op == "number":
            return number(self.machine, one, frame.bases[0])
        if one.op == "item":
            return frame.indices[-1]
        if one.op == "index":
            return self._index(frame, int(one.what or 0), copy)
        if one.op == "read":
            return self._read(frame, int(one.what or 0), copy)
        args = [self.value_at(frame, arg, copy) for arg in one.args]
        if one.op == "exit":
            return args[1]
        count = frame.counts[copy[1]] if varies else 1
        if one.op == "pick":
            return self._pick(frame, int(one.what or 0), args, count if varies else 0)
        kind = self.loops.program.operations[one.args[0]].kind
        kind = self.loops.program.operations[one.args[1]].kind if one.op == "where" else kind
        value = computed(self.machine, one, kind, args)
        if not varies and one.kind not in FLOATING and isinstance(value, Value) and is_vector(value):
            element = value.type[:-1].split(" x ")[1]
            value = self.f.op(element, f"extractelement {value}, i32 0", "alike")
        return value

    def _index(self, frame: LoopState, loop: int, copy: Copy) -> LaneValue:
        index = frame.indices[loop]
        if loop == self.loops.cut.lanes:
            return Ramp(index + copy[1] * self.machine.lanes, 1)
        return index + copy[0] if loop == self.loops.cut.rows else index

    def _read(self, frame: LoopState, source: int, copy: Copy) -> Value:
        view, cut = self.loops.sources[source], self.loops.cut
        along, across = (view.strides[loop] if loop != NONE else 0 for loop in (cut.lanes, cut.rows))
        address = frame.at[source] + (along * self.machine.lanes * copy[1] + across * copy[0])
        return load(self.machine, view.dtype, address, along, frame.counts[copy[1]])

    def _pick(self, frame: LoopState, source: int, indices: Sequence[LaneValue], count: int) -> Value:
        """Load the element at computed indices. count: the number of lanes, or 0 if the indices are uniform."""
        view = self.loops.sources[source]
        return self.address(frame.bases[source], view.strides, indices, count or 1).load(self.machine, view.dtype)

    def address(self, base: Value, strides: Sequence[int], indices: Sequence[LaneValue],
                count: int) -> ElementAddresses:
        """Return the address of the elements at an index along each axis."""
        step, far = 0, None
        for index, stride in zip(indices, strides, strict=True):
            if isinstance(index, Ramp):
                base, step = base + index.base * stride, step + index.step * stride
            elif is_vector(index):
                part = index * stride
                far = part if far is None else far + part
            else:
                base = base + index * stride
        if far is None:
            return ElementAddresses(base, step, count)
        far = far + Ramp(far.f.constant(0, I64), step).vector(self.machine.lanes)
        return ElementAddresses(base, step, count, [
            base + self.f.op(I64, f"extractelement {far}, i32 {lane}", "place") for lane in range(count)])

    # ---- reductions
    def reduced(self, frame: LoopState, required: set[int]) -> LoopState:
        """Emit all passes over the inner loops, and return the frame after them."""
        program, phases = self.loops.program, self.loops.phases
        for phase in range(max((phases[one] for one in required), default=0)):
            sums = [one for one in sorted(required)
                    if program.operations[one].op == "reduce" and phases[one] == phase + 1]
            acc: dict[object, Value] = {}
            for one in sums:
                self._begin(frame, one, acc)
            terms = program.needed([program.operations[one].args[0] for one in sums])
            self.over(frame, self.loops.inner, terms,
                      lambda inside, sums=sums, acc=acc: self._accumulate(inside, sums, acc), acc)  # type: ignore[misc]
            frame = replace(frame, values=dict(frame.values), phase=phase + 1)
            for one in sums:
                for copy in frame.copies():
                    if (key := self.key(one, copy)) not in frame.values:
                        frame.values[key] = self._end(one, copy, acc)
            self.fill(frame, required)
        return frame

    @property
    def _across(self) -> bool:
        """Return True if an inner loop is vectorised; each vector then has its own accumulator."""
        return self.loops.cut.lanes >= self.loops.outer

    def _accumulator_of(self, one: int, copy: Copy) -> Copy:
        """Return the copy of the accumulator that a copy of a reduction's term goes into."""
        row, part = self.key(self.loops.program.operations[one].args[0], copy)[1]
        return row, copy[1] if self._across else part

    def _accumulators(self, frame: LoopState, one: int) -> list[Copy]:
        """Return the copies of a reduction's accumulators."""
        parts = range(self.loops.cut.vectors if self._across else len(frame.counts))
        every = ((row, part) for row in range(frame.neighbours) for part in parts)
        return list(dict.fromkeys(self._accumulator_of(one, copy) for copy in every))

    def _begin(self, frame: LoopState, one: int, acc: dict[object, Value]) -> None:
        program = self.loops.program
        how, kind = str(program.operations[one].what), program.operations[program.operations[one].args[0]].kind
        for copy in self._accumulators(frame, one):
            acc[one, copy] = identity(self.machine, how, kind, frame.bases[0])
            if "_" in how:
                acc[one, copy, "where"] = self.f.constant(0, self.machine.of(I64))

    def _accumulate(self, frame: LoopState, sums: Sequence[int], acc: dict[object, Value]) -> None:
        for one in sums:
            operation = self.loops.program.operations[one]
            term, how = operation.args[0], str(operation.what)
            kind = self.loops.program.operations[term].kind
            for copy in dict.fromkeys(self._accumulator_of(one, copy) for copy in frame.copies()):
                before = acc[one, copy]
                count = frame.counts[copy[1]] if self._across else self.machine.lanes
                here = None if count == self.machine.lanes else self._first(count)
                if term in self._fused:
                    a, b = (spread(self.machine, self.value_at(frame, arg, copy))
                            for arg in self.loops.program.operations[term].args)
                    after = multiplied(a, b, before)
                    acc[one, copy] = after if here is None else self.f.select(here, after, before)
                    continue
                value = spread(self.machine, self.value_at(frame, term, copy))
                if "_" in how:
                    test = self._beats(how, kind, value, before)
                    test = test if here is None else test.binary("and", here)
                    offset = spread(self.machine, self._flat_index(frame, copy))
                    acc[one, copy] = self.f.select(test, value, before)
                    acc[one, copy, "where"] = self.f.select(test, offset, acc[one, copy, "where"])
                    continue
                if here is not None:
                    value = self.f.select(here, value, identity(self.machine, how, kind, value))
                acc[one, copy] = COMBINED[how](kind, value, before)

    def _first(self, count: int) -> Value:
        flags = ", ".join(f"i1 {int(lane < count)}" for lane in range(self.machine.lanes))
        return Value(self.f, vector(self.machine.lanes, I1), f"<{flags}>")

    @staticmethod
    def _beats(how: str, kind: str, value: Value, before: Value) -> Value:
        """Return an i1 that is true if a later element replaces an earlier one as the extreme."""
        order, _, extreme = how.partition("_")
        if order == "first":
            return better(kind, value, before, extreme == "max")
        return compared(kind, "le", *((before, value) if extreme == "max" else (value, before)))

    def _flat_index(self, frame: LoopState, copy: Copy) -> LaneValue:
        """Return the flat index of this iteration of the inner loops."""
        offset: LaneValue = self.f.constant(0, I64)
        extents = self.loops.extents
        for loop in range(self.loops.outer, len(extents)):
            factor = math.prod(extents[loop + 1:])
            index = self._index(frame, loop, copy)
            if isinstance(index, Ramp):
                assert isinstance(offset, Value)
                offset = Ramp(offset + index.base * factor, factor)
            elif isinstance(offset, Ramp):
                offset = Ramp(offset.base + index * factor, offset.step)
            else:
                offset = offset + index * factor
        return offset

    def _end(self, one: int, copy: Copy, acc: dict[object, Value]) -> LaneValue:
        """Return the result of a reduction, combined over all vectors and lanes if an inner loop is vectorised."""
        operation = self.loops.program.operations[one]
        how, kind = str(operation.what), self.loops.program.operations[operation.args[0]].kind
        row, part = self._accumulator_of(one, copy)
        parts = range(self.loops.cut.vectors) if self._across else [part]
        value = self._folded(how, kind, [(acc[one, (row, part)], acc.get((one, (row, part), "where")))
                                         for part in parts])
        alike = self.loops.cut.lanes not in self.loops.depends[one] and is_vector(value)
        if alike and operation.kind not in FLOATING:
            element = value.type[:-1].split(" x ")[1]
            return self.f.op(element, f"extractelement {value}, i32 0", "alike")
        return value

    def _folded(self, how: str, kind: str, pairs: list[tuple[Value, Value | None]]) -> Value:
        """Combine the accumulators of a reduction; if an inner loop is vectorised, over all lanes too."""
        while len(pairs) > 1:
            half = (len(pairs) + 1) // 2
            pairs = [self._merged(how, kind, pair, pairs[i + half]) if i + half < len(pairs) else pair
                     for i, pair in enumerate(pairs[:half])]
        pair, width = pairs[0], self.machine.lanes
        # Combine halves as shorter vectors. If only lane 0 of a full vector is read, LLVM 22 compares the wrong
        # floats (x86 with AVX-512: the packed comparison becomes a scalar one without the shuffle before it).
        while self._across and width > 1:
            width //= 2
            pair = self._merged(how, kind, self._part(pair, 0, width), self._part(pair, width, width))
        value, where = pair
        value = value if where is None else where
        return self.f.shuffle(value, None, [0] * self.machine.lanes, "all") if self._across else value

    def _part(self, pair: tuple[Value, Value | None], first: int, lanes: int) -> tuple[Value, Value | None]:
        value, where = pair
        picked = range(first, first + lanes)
        return (self.f.shuffle(value, None, picked, "half"),
                None if where is None else self.f.shuffle(where, None, picked, "half"))

    def _merged(self, how: str, kind: str, a: tuple[Value, Value | None],
                b: tuple[Value, Value | None]) -> tuple[Value, Value | None]:
        if a[1] is None or b[1] is None:
            return COMBINED[how](kind, a[0], b[0]), None
        order, _, extreme = how.partition("_")
        wins = better(kind, b[0], a[0], extreme == "max")
        tie = compared(kind, "eq", a[0], b[0]).binary("and", b[1].compare("slt" if order == "first" else "sgt", a[1]))
        wins = wins.binary("or", tie)
        return self.f.select(wins, b[0], a[0]), self.f.select(wins, b[1], a[1])


