"""Interface of the ways to distribute items, units and weights of a recurrent direction over a block's threads.

    sum[gate] = sum over k of state[k] * R[gate, k, unit]       for each assignment of a thread: a unit of an item
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.kernels.kernel import Tactic
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import FLOAT, I1, I32, vector
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.recurrence import QUANTIZED_STATES, Recurrence, Stage

SIZES = {"int8": 1, "int16": 2, "fp32": 4}
PIECE = 16              # bytes of weights or states per load
ACTIVATION = 36         # instructions, counted in SASS

Sums = dict[int, list[Value]]       # gate -> sum of each assignment


def update(problem: Recurrence) -> int:
    """Return the instructions per assignment and step other than products: activations of gates and of c of an LSTM."""
    return ACTIVATION * (problem.cells[0].gates + problem.cells[0].kept - 1)


def whole(count: int, of: int) -> int:
    """Round `count` up to a multiple of `of`."""
    return -(-count // of) * of


class StepWork(NamedTuple):
    """Estimated resources of a step of a block."""
    instructions: float     # per thread
    products: int           # mma per warp
    shared: float           # bytes from shared memory
    through: float          # bytes through the caches
    before: float           # bytes read before the first step
    registers: int          # per thread


class Sharing(Tactic, ABC):
    """Tactic of a recurrent layer.

    Attributes
    ----------
    items : int
        Items per block; all share the weights.
    lanes : sequence of int
        Lanes of a warp that have the same items, as the bits in which their numbers differ.
    ahead : bool
        Load x one step ahead.
    serial : int
        Cycles between a thread's instructions; more if they depend on each other.
    """
    items: int
    lanes: Sequence[int] = (16, 8, 4, 2, 1)
    ahead = True
    serial = 1

    @abstractmethod
    def threads(self, problem: Recurrence) -> int:
        """Return the threads per block."""

    @abstractmethod
    def row_bytes(self, problem: Recurrence) -> int:
        """Return the bytes of shared memory of one state of all items."""

    def kept_bytes(self, problem: Recurrence) -> int:
        """Return the bytes of weights in shared memory."""
        return 0

    @abstractmethod
    def work(self, problem: Recurrence) -> StepWork:
        """Return the estimated resources of a step."""
        ...

    @abstractmethod
    def pack(self, problem: Recurrence, weights: Array) -> Array:
        """Rearrange the weights [D, G unit, k] into the layout that the threads read."""

    @abstractmethod
    def products(self, seat: Seat) -> StepProducts:
        """Return the emitter of the products."""


@dataclass(frozen=True)
class Seat:
    """Thread of a block whose items begin at `first`.

    `items` is the batch size; None: all items of the block are valid.
    """
    gpu: Gpu
    f: Function
    problem: Recurrence
    direction: int
    threads: int
    thread: Value
    first: Value
    items: Value | None
    weights: Value

    def assign(self, unit: Value, column: Value, stores: Value | None = None, surely: bool = False) -> Assignment:
        """Return the assignment of a unit of the block's item `column`.

        Units and items past the end repeat the last one; `surely` asserts that the unit is valid. `stores` (i1) selects
        the threads that store.
        """
        always = self.f.constant(1, I1) if stores is None else stores
        puts = always if surely else always & unit.below(self.problem.hidden)
        unit = unit if surely else unit.at_most(self.problem.hidden - 1)
        if self.items is None:
            return Assignment(unit, column, self.first + column, puts, puts)
        number = self.first + column
        return Assignment(unit, column, number.at_most(self.items - 1), puts, puts & number.below(self.items))

    def item(self, column: int) -> Value:
        """Return the number of the block's item `column` in the batch, at most the last."""
        return self.first + column if self.items is None else (self.first + column).at_most(self.items - 1)


class Assignment(NamedTuple):
    """Unit of an item that a thread updates."""
    unit: Value
    column: Value       # number among the block's items
    item: Value         # number in the batch
    puts: Value         # i1: this thread stores its state in shared memory
    valid: Value        # i1: this thread stores its results


class StepProducts(ABC):
    """Emitter of the recurrent products of a step. A row of shared memory holds one state of all items.

    Attributes
    ----------
    assignments : sequence of Assignment
        Units and items of this thread.
    of_item : sequence of sequence of int
        Numbers of the assignments of each item.
    """
    assignments: Sequence[Assignment]
    of_item: Sequence[Sequence[int]]

    def __init__(self, seat: Seat) -> None:
        self.seat, self.f, self.gpu, self.problem = seat, seat.f, seat.gpu, seat.problem
        self.integers = self.problem.precision in QUANTIZED_STATES
        self.zero = self.f.constant(0, I32 if self.integers else FLOAT)

    @abstractmethod
    def begin(self, rows: Value, count: int) -> None:
        """Load the weights and clear `count` rows. All threads take part."""

    def clear(self, rows: Value, size: int) -> None:
        """Zero `size` bytes of shared memory."""
        nothing = Value(self.f, vector(4, I32), "zeroinitializer")
        for first in range(0, size // PIECE, self.seat.threads):
            assignment = self.seat.thread + first
            with self.f.when(assignment.below(size // PIECE)):
                self.f.store(nothing, rows + assignment * PIECE, PIECE)

    @abstractmethod
    def put(self, row: Value, assignment: Assignment, state: Value, zero: Value | None) -> None:
        """Store the state of an assignment, a float or an i32 without zero point.

        `zero` is the zero point to add if the state was quantised to its own range.
        """

    @abstractmethod
    def sums(self, stage: Stage, row: Value, zeros: Sequence[Value]) -> Sums:
        """Return the sums over all k.

        `zeros` are the assignments' zero points if states were quantised to their own range.
        """


