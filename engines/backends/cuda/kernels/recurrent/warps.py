"""Recurrent products of INT8 and INT16 on tensor cores: a warp multiplies tiles of 16 units by 8 items for all gates.

    sums[gate][unit, item] += R[gate][unit, k] * state[item, k]         mma, 32 bytes of k at a time

The sums of all gates of a unit, and thus its update, are in one lane. Weights are stored as fragments: resident in
registers, then in shared memory; the rest is read through the caches in every step, once for all items. 16-bit weights
and states are 256 times a signed byte plus an unsigned byte; their products are added from the highest byte down, which
is exact modulo 2**32:

    ((high * high) * 256 + high * low + low * high) * 256 + low * low
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from infer_server.engines.backends.cuda.codegen.gpu import WARP, Gpu
from infer_server.engines.backends.cuda.codegen.module import elements, opaque_address, shared, wide
from infer_server.engines.backends.cuda.codegen.products import STEP, load_tiles, multiply_bytes
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
)
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import I8, I32, vector
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.recurrence import Recurrence, Stage

UNITS, ITEMS = 16, 8    # per product
TURN = 2 * STEP         # bytes of k per iteration
ONES = 0x01010101
BASE_REGISTERS = 56     # registers per thread in addition to those of its assignments
AT_EDGE = 32            # further registers if the last warp is partial
TOGETHER = (8, 16)      # items per block; with more, a lane's values spill
MOST_TILED = {"int8": 512, "int16": 128}        # units; beyond them threads spill
BY_ONE = 16             # warps per block up to which a warp has one tile; else two

# Passes of a precision, each a list of products: (types of weight and state, byte of the weight, byte of the state).
Products = Sequence[tuple[str, int, int]]
WHOLE: Sequence[Products] = ([("s8", 0, 0)],)
ROUNDED: Sequence[Products] = ([("s8.u8", 0, 0)],)
HALVES: Sequence[Products] = ([("s8", 0, 0)], [("s8.u8", 0, 1), ("u8.s8", 1, 0)], [("u8", 1, 1)])

Piece = Sequence[Value]
Acc = dict[tuple[int, int, int, int], Value]    # (gate, tile, group of eight items, the lane's sum)
States = Callable[[int | Value, int], list[list[Piece]]]        # (iteration, byte) -> [eight items][half of it]


def passes(problem: Recurrence) -> Sequence[Products]:
    """Return the passes of products, from the highest byte down."""
    return HALVES if problem.precision == "int16" else ROUNDED if problem.rounds else WHOLE


@dataclass(frozen=True)
class Tiled(Sharing):
    """Tactic with `tiles` tiles per warp.

    `registers` pieces per lane are in registers; the weights of `resident` iterations stay in the block.
    """
    items: int
    tiles: int
    registers: int = 0
    resident: int = 0
    lanes = (16, 8, 4)
    ahead = False

    def __str__(self) -> str:
        return (f"{self.items} items a block by tensor cores, {self.tiles * UNITS} units a warp, "
                f"{self.registers} pieces in registers, {self.resident * TURN} of k kept")

    # ---- pieces of weights
    def turns(self, problem: Recurrence) -> int:
        return -(-problem.hidden // TURN)

    def pieces(self, problem: Recurrence) -> int:
        """Return the pieces per lane and iteration."""
        return problem.cells[0].gates * self.tiles * SIZES[problem.precision] * (TURN // STEP)

    def settled(self, problem: Recurrence, registers: int, shared_bytes: int) -> Tiled:
        """Return the tactic with as many resident weights as fit.

        Parameters
        ----------
        problem : Recurrence
            Problem to solve.
        registers : int
            Registers per thread.
        shared_bytes : int
            Shared memory of a block.
        """
        each, threads = self.pieces(problem), self.threads(problem)
        mine = max(registers - self.work(problem).registers, 0) // 4
        beyond = max(shared_bytes - self._rows(problem), 0) // (threads * PIECE)
        resident = min(self.turns(problem), (mine + beyond) // each)
        return replace(self, registers=min(mine, resident * each), resident=resident)

    def _rows(self, problem: Recurrence) -> int:
        """Return the bytes of shared memory for at most three states, two of them h, and for the extremes."""
        return 3 * self.row_bytes(problem) + 8 * self.items * self.threads(problem) // WARP

    # ---- resources of a block
    def threads(self, problem: Recurrence) -> int:
        return -(-problem.hidden // (UNITS * self.tiles)) * WARP

    def is_full(self, problem: Recurrence) -> bool:
        """Return True if the hidden size fills every column of the tiles."""
        return problem.hidden % (UNITS * self.tiles) == 0

    def pitch(self, problem: Recurrence) -> int:
        """Return the bytes between items in shared memory, padded so that eight items cover eight groups of banks."""
        return self.turns(problem) * TURN + PIECE

    def row_bytes(self, problem: Recurrence) -> int:
        return SIZES[problem.precision] * self.items * self.pitch(problem)

    def kept_bytes(self, problem: Recurrence) -> int:
        return (self.resident * self.pieces(problem) - self.registers) * self.threads(problem) * PIECE

    def work(self, problem: Recurrence) -> StepWork:
        cell, turns, threads = problem.cells[0], self.turns(problem), self.threads(problem)
        ways, assignments = sum(map(len, passes(problem))), 4 * self.tiles * self.items // ITEMS
        products = ways * cell.gates * turns * (TURN // STEP) * self.tiles * self.items // ITEMS
        each, loads = self.pieces(problem), SIZES[problem.precision]   # each byte of 16-bit weights is multiplied twice
        states = SIZES[problem.precision] * turns * self.items // ITEMS
        through = loads * (turns - self.resident) * each
        instructions = (products + loads * (self.resident * each - self.registers) + through + states
                        + update(problem) * assignments)
        base = BASE_REGISTERS + (0 if self.is_full(problem) else AT_EDGE)
        registers = base + assignments * (cell.gates + cell.kept + 3) + 4 * self.registers
        return StepWork(instructions, products, loads * self.kept_bytes(problem) + states * PIECE * threads,
                        through * threads * PIECE, self.resident * each * threads * PIECE, registers)

    def pack(self, problem: Recurrence, weights: Array) -> Array:
        """Rearrange [D, G unit, k] into fragments.

        The layout is [D][warp][iteration][half of it][gate][tile][byte][lane][16 bytes]. Units past the end repeat the
        last one; k is padded with zeros.
        """
        count, hidden, warps = len(weights), problem.hidden, self.threads(problem) // WARP
        units, depth = warps * self.tiles * UNITS, self.turns(problem) * TURN
        filled = weights.reshape(count, -1, hidden, hidden)
        filled = np.pad(filled, [(0, 0), (0, 0), (0, units - hidden), (0, 0)], "edge")
        filled = np.pad(filled, [(0, 0), (0, 0), (0, 0), (0, depth - hidden)])
        parts = [filled >> 8, filled & 255] if problem.precision == "int16" else [filled]
        bytes_ = np.stack([part.astype(np.uint8) for part in parts])
        tiles = bytes_.reshape(len(parts), count, -1, warps, self.tiles, 2, 8, depth // STEP, 2, 4, 4)
        return np.ascontiguousarray(tiles.transpose(1, 3, 7, 2, 4, 0, 6, 9, 8, 5, 10))

    def products(self, seat: Seat) -> StepProducts:
        return _Products(seat, self)


def tilings(problem: Recurrence, gpu: Gpu) -> Iterator[Tiled]:
    """Yield the tilings to consider, without resident weights."""
    if gpu.by_warp("int8") and problem.hidden <= MOST_TILED.get(problem.precision, 0):
        for items in TOGETHER:
            yield Tiled(items, 1 if problem.hidden <= BY_ONE * UNITS else 2)


class _Products(StepProducts):
    """Emitter of the products.

    Lane 4 g + t has units g and g + 8 of a tile, and items 2 t and 2 t + 1 of each eight.
    """

    def __init__(self, seat: Seat, tactic: Tiled) -> None:
        super().__init__(seat)
        self.tactic, problem = tactic, seat.problem
        self.lane, self.warp = seat.thread & WARP - 1, seat.thread.binary("lshr", WARP.bit_length() - 1)
        self.gates, self.eights = problem.cells[0].gates, tactic.items // ITEMS
        g, t = self.lane.binary("lshr", 2), self.lane & 3
        surely = tactic.is_full(problem)
        unit = self.warp * (tactic.tiles * UNITS) + g
        self.assignments = [seat.assign(unit + (tile * UNITS + e // 2 * 8), t * 2 + (n * ITEMS + e % 2), surely=surely)
                            for tile, n, e in self._numbers()]
        self.of_item = [[i for i, (_, n, e) in enumerate(self._numbers()) if (n, e % 2) == of]
                        for of in ((n, e) for n in range(self.eights) for e in (0, 1))]
        self.turns, self.pieces, self.pitch = tactic.turns(problem), tactic.pieces(problem), tactic.pitch(problem)
        of_warp = self.turns * self.pieces * WARP * PIECE
        first = wide(self.warp * of_warp + self.lane * PIECE) + seat.direction * (seat.threads // WARP) * of_warp
        self.mine, self.kept = seat.weights + first, list[Piece]()
        self.totals: Acc = {}           # sums of weights, if states have a zero point
        # Address for ldmatrix: lanes of a group of eight take an item each, and groups take quarters of an iteration.
        self.row = (self.lane & 7) * self.pitch + self.lane.binary("lshr", 3) * PIECE

    def _numbers(self) -> list[tuple[int, int, int]]:
        """Return tile, group of eight items and sum of each of the lane's assignments."""
        return [(tile, n, e) for tile in range(self.tactic.tiles) for n in range(self.eights) for e in range(4)]

    def _keys(self, gates: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        for gate in gates:
            for tile, n, e in self._numbers():
                yield gate, tile, n, e

    # ---- weights
    def begin(self, rows: Value, count: int) -> None:
        f = self.f
        for n in range(self.tactic.resident * self.pieces):
            piece = self._through(self.mine, n)
            if n < self.tactic.registers:
                self.kept.append(elements(piece))
            else:
                f.store(piece, self._beyond(n), PIECE)
        self.clear(rows, count * self.tactic.row_bytes(self.problem))
        if self.problem.rounds:
            ones = [f.constant(ONES, I32)] * 2
            self.totals = self._multiplied(range(self.gates), lambda turn, byte: [[ones, ones]] * self.eights)

    def _through(self, first: Value, n: int) -> Value:
        return self.f.load(vector(4, I32), first + n * WARP * PIECE, PIECE, "piece")

    def _loaded(self, first: Value, n: int) -> Piece:
        return elements(self._through(first, n))

    def _beyond(self, n: int) -> Value:
        """Return the address of the thread's n-th piece in shared memory."""
        at = (n - self.tactic.registers) * self.seat.threads * PIECE
        return shared(self.f) + (self.seat.thread * PIECE + at)

    def _piece(self, n: int) -> Piece:
        if n < len(self.kept):
            return self.kept[n]
        return elements(self.f.load(vector(4, I32), self._beyond(n), PIECE, "piece"))

    # ---- a step
    def put(self, row: Value, assignment: Assignment, state: Value, zero: Value | None) -> None:
        at = row + (assignment.column * self.pitch + assignment.unit)
        state = state + zero if zero else state
        parts = [state >> 8, state] if self.problem.precision == "int16" else [state]
        for byte, part in enumerate(parts):
            self.f.store(self.f.cast("trunc", part, I8, "stored"), at + byte * self.tactic.items * self.pitch, 1)

    def sums(self, stage: Stage, row: Value, zeros: Sequence[Value]) -> Sums:
        def states(turn: int | Value, byte: int) -> list[list[Piece]]:
            first = byte * self.tactic.items * self.pitch
            tiles = (load_tiles(row + (self.row + turn * TURN + (first + n * ITEMS * self.pitch)))
                     for n in range(self.eights))
            return [[four[:2], four[2:]] for four in tiles]
        acc, found = self._multiplied(stage.gates, states), Sums()
        for gate in stage.gates:
            found[gate] = [acc[gate, *number] for number in self._numbers()]
            if zeros:
                found[gate] = [total - zero * self.totals[gate, *number] for total, zero, number in zip(
                    found[gate], zeros, self._numbers(), strict=True)]
        return found

    def _multiplied(self, gates: Sequence[int], states: States) -> Acc:
        f, resident = self.f, self.tactic.resident
        acc, mine = {key: self.zero for key in self._keys(gates)}, opaque_address(self.mine)
        for number, products in enumerate(passes(self.problem)):
            if number:
                acc = {key: value << 8 for key, value in acc.items()}
            for stays in range(resident):
                kept = [partial(self._piece, stays * self.pieces + n) for n in range(self.pieces)]
                self._turn(acc, gates, products, partial(states, stays), kept)
            if resident < self.turns:
                for i in f.loop("turn", self.turns - resident, acc=acc):
                    first = mine + (i + resident) * (self.pieces * WARP * PIECE)
                    loaded = [partial(self._loaded, first, n) for n in range(self.pieces)]
                    turn = f.cast("trunc", i, I32, "turn") + resident
                    self._turn(acc, gates, products, partial(states, turn), loaded)
        return acc

    def _turn(self, acc: Acc, gates: Sequence[int], products: Products, states: Callable[[int], list[list[Piece]]],
              pieces: Sequence[Callable[[], Piece]]) -> None:
        tiles, size = self.tactic.tiles, SIZES[self.problem.precision]
        found = {byte: states(byte) for byte in sorted({byte for _, _, byte in products})}
        for half, gate, tile in product(range(TURN // STEP), gates, range(tiles)):
            for types, of_weight, of_state in products:
                weights = pieces[((half * self.gates + gate) * tiles + tile) * size + of_weight]()
                for n in range(self.eights):
                    keys = [(gate, tile, n, e) for e in range(4)]
                    sums = multiply_bytes(self.gpu, types, [acc[key] for key in keys], weights,
                                          found[of_state][n][half])
                    acc.update(zip(keys, sums, strict=True))
