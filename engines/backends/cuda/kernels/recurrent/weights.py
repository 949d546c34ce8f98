"""How a block makes the sums of a step: weights that stay with its threads, or that come through the caches.

    sum[gate] = sum over k of state[k] * R[gate, k, unit]

Kept: the lanes of a unit share its k, 16 bytes after 16 bytes, and each has its weights from the first step to the
last, in registers and then in shared memory; what they make is added across the lanes. Bytes are multiplied by dp4a.
Weights of 16 bits are 256 times a signed byte and an unsigned one, and each is multiplied by two of the state at once
(dp2a).
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.backends.cuda.codegen.gpu import WARP, Gpu
from engines.backends.cuda.codegen.module import across, elements, shared, wide
from engines.backends.cuda.codegen.products import dot, dot_pair, dot_signed
from engines.backends.cuda.kernels.kernel import Tactic
from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import FLOAT, I8, I16, I32, vector
from engines.lowering.problems.problem import Array
from engines.lowering.problems.recurrence import QUANTIZED_STATES, Recurrence, Stage

PIECE = 16              # bytes that a thread takes at once
ONES = 0x01010101
SIZES = {"int8": 1, "int16": 2, "fp32": 4}

Sums = dict[int, Value]         # by gate


@dataclass(frozen=True)
class Kept(Tactic):
    """parts: lanes of a unit. registers: pieces of weights that a thread has in registers; the others are in shared
    memory."""
    parts: int
    registers: int

    def __str__(self) -> str:
        return f"{self.parts} lanes a unit, {self.registers} pieces in registers"


def threads_of(problem: Recurrence, tactic: Tactic) -> int:
    """Of a block."""
    return -(-problem.hidden * (tactic.parts if isinstance(tactic, Kept) else 1) // WARP) * WARP


@dataclass(frozen=True)
class Pieces:
    """The weights of a direction as the lanes of a unit share them."""
    problem: Recurrence
    parts: int

    @property
    def size(self) -> int:
        return SIZES[self.problem.precision]

    @property
    def of_gate(self) -> int:
        """Of a lane; k is filled up by zeros."""
        return -(-self.problem.hidden * self.size // (PIECE * self.parts))

    @property
    def count(self) -> int:
        return self.of_gate * self.problem.cells[0].gates

    @property
    def row_bytes(self) -> int:
        """Of a state."""
        return self.of_gate * self.parts * PIECE

    def pack(self, weights: Array) -> Array:
        """[D, G unit, k] -> [D][G, piece of a lane][unit][lane][16 bytes]"""
        problem, each = self.problem, PIECE // self.size
        fill = self.row_bytes // self.size - problem.hidden
        filled = np.pad(weights, [(0, 0), (0, 0), (0, fill)])
        if problem.precision == "int16":        # of four, the high bytes and then the low ones
            four = filled.reshape(*filled.shape[:2], -1, 1, 4).astype(np.int16)
            filled = np.concatenate([four >> 8, four & 255], -2).astype(np.uint8)
        lanes = np.ascontiguousarray(filled).view(np.uint8).reshape(
            len(weights), -1, problem.hidden, self.of_gate, self.parts, each * self.size)
        return np.ascontiguousarray(lanes.transpose(0, 1, 3, 2, 4, 5))


@dataclass(frozen=True)
class Seat:
    """A thread: its unit, and which of the unit's lanes it is. Those behind the last unit work for it once more."""
    gpu: Gpu
    f: Function
    problem: Recurrence
    direction: int
    threads: int
    thread: Value
    unit: Value
    part: Value
    weights: Value


class StepProducts(ABC):
    """What the threads of a block need for the sums of a unit. A row has a state as products read it."""

    def __init__(self, seat: Seat) -> None:
        self.seat, self.f, self.gpu, self.problem = seat, seat.f, seat.gpu, seat.problem
        self.integers = self.problem.precision in QUANTIZED_STATES
        self.zero = self.f.constant(0, I32 if self.integers else FLOAT)

    @abstractmethod
    def begin(self, rows: Value, count: int) -> None:
        """Before the first state is put into one of so many rows: all threads take part."""

    @abstractmethod
    def put(self, row: Value, state: Value, zero: Value | None) -> None:
        """The unit's state, a float or an i32. zero: what 0 is among the bytes of a state that was rounded to its own
        range; the state is without it."""

    @abstractmethod
    def sums(self, stage: Stage, row: Value, zero: Value | None) -> Sums:
        """Of all k, for every lane of the unit."""


class ThroughCaches(StepProducts):
    """A lane for each unit, which reads its weights [k][unit] in every step."""

    def begin(self, rows: Value, count: int) -> None:
        """Nothing is kept."""

    def put(self, row: Value, state: Value, zero: Value | None) -> None:
        self.f.store(state, row + self.seat.unit * 4, 4)

    def sums(self, stage: Stage, row: Value, zero: Value | None) -> Sums:
        f, seat, hidden, cell = self.f, self.seat, self.problem.hidden, self.problem.cells[0]
        size = SIZES[self.problem.precision]
        element = {1: I8, 2: I16, 4: FLOAT}[size]
        acc = dict.fromkeys(stage.gates, self.zero)
        column = seat.weights + wide(seat.unit) * size + seat.direction * cell.gates * hidden * hidden * size
        for k in f.loop("k", hidden, acc=acc):
            state = f.load(self.zero.type, row + f.cast("trunc", k, I32, "k") * 4, 4, "state")
            for gate in stage.gates:
                weight = f.load(element, column + (k * (hidden * size) + gate * hidden * hidden * size), size, "weight")
                acc[gate] = acc[gate] + state * f.cast("sext", weight, I32, "wide") if self.integers else self.gpu.fma(
                    weight, state, acc[gate])
        return acc


class FromLanes(StepProducts):
    """The lanes of a unit have its weights."""

    def __init__(self, seat: Seat, tactic: Kept) -> None:
        super().__init__(seat)
        self.tactic, self.pieces = tactic, Pieces(seat.problem, tactic.parts)
        self.kept: list[list[Value]] = []
        self.totals: Sums = {}          # of a gate's weights, where states have a zero point

    @property
    def _beyond(self) -> Value:
        """Where the thread's pieces in shared memory begin."""
        return shared(self.f) + self.seat.thread * PIECE

    def begin(self, rows: Value, count: int) -> None:
        f, seat, pieces = self.f, self.seat, self.pieces
        every = self.problem.hidden * self.tactic.parts
        mine = seat.weights + wide(seat.unit * self.tactic.parts + seat.part) * PIECE
        for n in range(pieces.count):
            piece = f.load(vector(4, I32), mine + (seat.direction * pieces.count + n) * every * PIECE, PIECE, "piece")
            if n < self.tactic.registers:
                self.kept.append(elements(piece))
            else:
                f.store(piece, self._beyond + (n - self.tactic.registers) * seat.threads * PIECE, PIECE)
        self._clear(rows, count * pieces.row_bytes // PIECE)
        if self.problem.rounds:
            one = f.constant(ONES, I32)
            for gate in range(self.problem.cells[0].gates):
                total = self.zero
                for i in range(pieces.of_gate):
                    for word in self._piece(gate, i):
                        total = dot_signed(total, one, word)
                self.totals[gate] = self._added_up(total)

    def _clear(self, rows: Value, count: int) -> None:
        """Zeros behind the last unit, too."""
        f, threads = self.f, self.seat.threads
        nothing = Value(f, vector(4, I32), "zeroinitializer")
        for first in range(0, count, threads):
            place = self.seat.thread + first
            with f.when(place.below(count)):
                f.store(nothing, rows + place * PIECE, PIECE)

    def _piece(self, gate: int, i: int) -> list[Value]:
        n = gate * self.pieces.of_gate + i
        if n < len(self.kept):
            return self.kept[n]
        at = self._beyond + (n - self.tactic.registers) * self.seat.threads * PIECE
        return elements(self.f.load(vector(4, I32), at, PIECE, "piece"))

    def put(self, row: Value, state: Value, zero: Value | None) -> None:
        size = self.pieces.size
        state = state + zero if zero else state
        if self.integers:
            state = self.f.cast("trunc", state, {1: I8, 2: I16}[size], "stored")
        self.f.store(state, row + self.seat.unit * size, size)

    def sums(self, stage: Stage, row: Value, zero: Value | None) -> Sums:
        acc = {gate: [self.zero, self.zero] for gate in stage.gates}
        for i in range(self.pieces.of_gate):
            at = row + (self.seat.part + i * self.tactic.parts) * PIECE
            state = elements(self.f.load(vector(4, I32), at, PIECE, "state"))
            for gate in stage.gates:
                acc[gate] = self._multiplied(acc[gate], self._piece(gate, i), state)
        result = {}
        for gate, (low, high) in acc.items():
            total = self._added_up(low + (high << 8) if self.problem.precision == "int16" else low)
            result[gate] = total - zero * self.totals[gate] if zero else total
        return result

    def _multiplied(self, acc: Sequence[Value], weights: Sequence[Value], state: Sequence[Value]) -> list[Value]:
        low, high = acc
        if self.problem.precision == "int16":
            for n, pair in enumerate(state):
                high = dot_pair(high, pair, weights[n // 2 * 2], n % 2, signed=True)
                low = dot_pair(low, pair, weights[n // 2 * 2 + 1], n % 2, signed=False)
            return [low, high]
        for weight, value in zip(weights, state, strict=True):
            if self.integers and not self.problem.rounds:
                low = dot_signed(low, value, weight)
            else:
                low = dot(self.gpu, self.problem.precision, low, value, weight)
        return [low, high]

    def _added_up(self, value: Value) -> Value:
        distance = self.tactic.parts // 2
        while distance:
            value, distance = value + across(value, distance), distance // 2
        return value
