"""Recurrent products with resident weights: the lanes of a unit share its products.

Each lane of a unit keeps its share of k, in pieces of 16 bytes, from the first step to the last, in registers and then
in shared memory; products are reduced across the lanes. Bytes are multiplied by dp4a. A 16-bit weight is 256 times a
signed byte plus an unsigned byte, each multiplied by two 16-bit states at once (dp2a).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import elements, shared, shuffle_xor, wide
from infer_server.engines.backends.cuda.codegen.products import dot, dot_pair, dot_signed
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
from infer_server.engines.codegen.types import I8, I16, I32, vector
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.recurrence import Recurrence, Stage

ONES = 0x01010101
BASE_REGISTERS = 72     # registers per thread in addition to its weights


@dataclass(frozen=True)
class Kept(Sharing):
    """Tactic with `parts` lanes per unit and `registers` pieces of weights per thread in registers.

    The remaining pieces are in shared memory.
    """
    parts: int
    registers: int
    items = 1
    serial = 2              # most instructions depend on the previous one

    def __str__(self) -> str:
        return f"{self.parts} lanes a unit, {self.registers} pieces in registers"

    def threads(self, problem: Recurrence) -> int:
        return whole(problem.hidden * self.parts, WARP)

    def row_bytes(self, problem: Recurrence) -> int:
        return Pieces(problem, self.parts).row_bytes

    def kept_bytes(self, problem: Recurrence) -> int:
        return (Pieces(problem, self.parts).count - self.registers) * self.threads(problem) * PIECE

    def work(self, problem: Recurrence) -> StepWork:
        pieces, gates = Pieces(problem, self.parts), problem.cells[0].gates
        products = 8 if problem.precision == "int16" else 4
        instructions = (products * pieces.count + pieces.of_gate + 2 * gates * self.parts.bit_length()
                        + update(problem))
        return StepWork(instructions, 0, self.kept_bytes(problem), 0, pieces.size * gates * problem.hidden ** 2,
                        BASE_REGISTERS + 4 * self.registers)

    def pack(self, problem: Recurrence, weights: Array) -> Array:
        return Pieces(problem, self.parts).pack(weights)

    def products(self, seat: Seat) -> StepProducts:
        return _Products(seat, self)


@dataclass(frozen=True)
class Pieces:
    """Partition of a direction's weights among the lanes of a unit."""
    problem: Recurrence
    parts: int

    @property
    def size(self) -> int:
        return SIZES[self.problem.precision]

    @property
    def of_gate(self) -> int:
        """Pieces per lane and gate; k is padded with zeros."""
        return -(-self.problem.hidden * self.size // (PIECE * self.parts))

    @property
    def count(self) -> int:
        return self.of_gate * self.problem.cells[0].gates

    @property
    def row_bytes(self) -> int:
        """Bytes of a state."""
        return self.of_gate * self.parts * PIECE

    def pack(self, weights: Array) -> Array:
        """Rearrange [D, G unit, k] into [D][G, piece of a lane][unit][lane][16 bytes]."""
        problem, each = self.problem, PIECE // self.size
        fill = self.row_bytes // self.size - problem.hidden
        filled = np.pad(weights, [(0, 0), (0, 0), (0, fill)])
        if problem.precision == "int16":        # per four weights: high bytes, then low bytes
            four = filled.reshape(*filled.shape[:2], -1, 1, 4).astype(np.int16)
            filled = np.concatenate([four >> 8, four & 255], -2).astype(np.uint8)
        lanes = np.ascontiguousarray(filled).view(np.uint8).reshape(
            len(weights), -1, problem.hidden, self.of_gate, self.parts, each * self.size)
        return np.ascontiguousarray(lanes.transpose(0, 1, 3, 2, 4, 5))


class _Products(StepProducts):
    """Emitter of the products. The first lane of a unit stores its results; lanes past the last unit repeat it."""

    def __init__(self, seat: Seat, tactic: Kept) -> None:
        super().__init__(seat)
        self.tactic, self.pieces = tactic, Pieces(seat.problem, tactic.parts)
        unit, self.part = seat.thread.divided(tactic.parts), seat.thread.remainder(tactic.parts)
        surely, first = seat.threads == seat.problem.hidden * tactic.parts, self.part.compare("eq", 0)
        self.assignments, self.of_item = [seat.assign(unit, unit.like(0), first, surely)], [[0]]
        self.kept: list[list[Value]] = []
        self.totals: dict[int, Value] = {}      # sums of a gate's weights, if states have a zero point

    @property
    def _beyond(self) -> Value:
        """Address of the thread's pieces in shared memory."""
        return shared(self.f) + self.seat.thread * PIECE

    def begin(self, rows: Value, count: int) -> None:
        f, seat, pieces = self.f, self.seat, self.pieces
        every = self.problem.hidden * self.tactic.parts
        mine = seat.weights + wide(self.assignments[0].unit * self.tactic.parts + self.part) * PIECE
        for n in range(pieces.count):
            piece = f.load(vector(4, I32), mine + (seat.direction * pieces.count + n) * every * PIECE, PIECE, "piece")
            if n < self.tactic.registers:
                self.kept.append(elements(piece))
            else:
                f.store(piece, self._beyond + (n - self.tactic.registers) * seat.threads * PIECE, PIECE)
        self.clear(rows, count * pieces.row_bytes)
        if self.problem.rounds:
            one = f.constant(ONES, I32)
            for gate in range(self.problem.cells[0].gates):
                total = self.zero
                for i in range(pieces.of_gate):
                    for word in self._piece(gate, i):
                        total = dot_signed(total, one, word)
                self.totals[gate] = self._added_up(total)

    def _piece(self, gate: int, i: int) -> list[Value]:
        n = gate * self.pieces.of_gate + i
        if n < len(self.kept):
            return self.kept[n]
        at = self._beyond + (n - self.tactic.registers) * self.seat.threads * PIECE
        return elements(self.f.load(vector(4, I32), at, PIECE, "piece"))

    def put(self, row: Value, assignment: Assignment, state: Value, zero: Value | None) -> None:
        size = self.pieces.size
        state = state + zero if zero else state
        if self.integers:
            state = self.f.cast("trunc", state, {1: I8, 2: I16}[size], "stored")
        self.f.store(state, row + assignment.unit * size, size)

    def sums(self, stage: Stage, row: Value, zeros: Sequence[Value]) -> Sums:
        acc = {gate: [self.zero, self.zero] for gate in stage.gates}
        for i in range(self.pieces.of_gate):
            at = row + (self.part + i * self.tactic.parts) * PIECE
            state = elements(self.f.load(vector(4, I32), at, PIECE, "state"))
            for gate in stage.gates:
                acc[gate] = self._multiplied(acc[gate], self._piece(gate, i), state)
        result: Sums = {}
        for gate, (low, high) in acc.items():
            total = self._added_up(low + (high << 8) if self.problem.precision == "int16" else low)
            result[gate] = [total - zeros[0] * self.totals[gate] if zeros else total]
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
            value, distance = value + shuffle_xor(value, distance), distance // 2
        return value
