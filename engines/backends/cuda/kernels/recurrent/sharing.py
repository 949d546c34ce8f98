"""How the threads of a block share the items, units and weights of a direction: what every way of it says of itself.

    sum[gate] = sum over k of state[k] * R[gate, k, unit]       for each place of a thread: a unit of an item
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engines.backends.cuda.codegen.gpu import Gpu
from engines.backends.cuda.kernels.kernel import Tactic
from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import FLOAT, I1, I32, vector
from engines.lowering.problems.problem import Array
from engines.lowering.problems.recurrence import QUANTIZED_STATES, Recurrence, Stage

SIZES = {"int8": 1, "int16": 2, "fp32": 4}
PIECE = 16              # bytes of weights or of a state that a thread takes at once
ACTIVATION = 36         # instructions, counted in SASS

Sums = dict[int, list[Value]]       # by gate, of each place


def update(problem: Recurrence) -> int:
    """Instructions of a place and step beside its products: an activation of each gate, and of what an LSTM keeps."""
    return ACTIVATION * (problem.cells[0].gates + problem.cells[0].kept - 1)


def whole(count: int, of: int) -> int:
    """The next multiple."""
    return -(-count // of) * of


class Work(NamedTuple):
    """What a step takes of a block, roughly."""
    instructions: float     # of a thread
    products: int           # of a warp, by tensor cores
    shared: float           # bytes from shared memory
    through: float          # ... through the caches
    before: float           # ... before the first step
    registers: int          # of a thread


class Sharing(Tactic, ABC):
    """items: of a block, which has the weights once for all. lanes: those of a warp with the same items, as the bits in
    which their numbers differ. ahead: x is loaded a step before it is needed. serial: cycles from one instruction of a
    thread to the next, fewer where many of them do not wait for each other."""
    items: int
    lanes: Sequence[int] = (16, 8, 4, 2, 1)
    ahead = True
    serial = 1

    @abstractmethod
    def threads(self, problem: Recurrence) -> int:
        """Of a block."""

    @abstractmethod
    def row_bytes(self, problem: Recurrence) -> int:
        """Of a state of all items, as products read it from shared memory."""

    def kept_bytes(self, problem: Recurrence) -> int:
        """Of weights in shared memory."""
        return 0

    @abstractmethod
    def work(self, problem: Recurrence) -> Work:
        ...

    @abstractmethod
    def pack(self, problem: Recurrence, weights: Array) -> Array:
        """[D, G unit, k] as its threads read them."""

    @abstractmethod
    def products(self, seat: Seat) -> StepProducts:
        """What writes them."""


@dataclass(frozen=True)
class Seat:
    """A thread of a block whose items begin at `first`. items: of the batch; None: the block's are surely there."""
    gpu: Gpu
    f: Function
    problem: Recurrence
    direction: int
    threads: int
    thread: Value
    first: Value
    items: Value | None
    weights: Value

    def place(self, unit: Value, column: Value, stores: Value | None = None, surely: bool = False) -> Place:
        """Of the block's item `column`. Behind the last unit, where it is not surely below, and the last item those are
        computed once more. stores: whether this thread does."""
        always = self.f.constant(1, I1) if stores is None else stores
        puts = always if surely else always & unit.below(self.problem.hidden)
        unit = unit if surely else unit.at_most(self.problem.hidden - 1)
        if self.items is None:
            return Place(unit, column, self.first + column, puts, puts)
        number = self.first + column
        return Place(unit, column, number.at_most(self.items - 1), puts, puts & number.below(self.items))

    def item(self, column: int) -> Value:
        """The block's item of that number, or the last."""
        return self.first + column if self.items is None else (self.first + column).at_most(self.items - 1)


class Place(NamedTuple):
    unit: Value
    column: Value       # among the block's items
    item: Value         # of the batch
    puts: Value         # whether its states are this thread's to put into shared memory
    there: Value        # ... and its results to store


class StepProducts(ABC):
    """What the threads of a block need for the sums of a unit. A row has a state as products read it.

    places: of this thread; of_item: which of them are of one item."""
    places: Sequence[Place]
    of_item: Sequence[Sequence[int]]

    def __init__(self, seat: Seat) -> None:
        self.seat, self.f, self.gpu, self.problem = seat, seat.f, seat.gpu, seat.problem
        self.integers = self.problem.precision in QUANTIZED_STATES
        self.zero = self.f.constant(0, I32 if self.integers else FLOAT)

    @abstractmethod
    def begin(self, rows: Value, count: int) -> None:
        """Before the first state is put into one of so many rows: all threads take part."""

    def clear(self, rows: Value, size: int) -> None:
        """So many bytes of shared memory, behind the last unit, too, become zeros."""
        nothing = Value(self.f, vector(4, I32), "zeroinitializer")
        for first in range(0, size // PIECE, self.seat.threads):
            place = self.seat.thread + first
            with self.f.when(place.below(size // PIECE)):
                self.f.store(nothing, rows + place * PIECE, PIECE)

    @abstractmethod
    def put(self, row: Value, place: Place, state: Value, zero: Value | None) -> None:
        """The place's state, a float or an i32. zero: what 0 is among the bytes of a state that was rounded to its own
        range; the state is without it."""

    @abstractmethod
    def sums(self, stage: Stage, row: Value, zeros: Sequence[Value]) -> Sums:
        """Of all k. zeros: of each place, where states were rounded to their own range."""


