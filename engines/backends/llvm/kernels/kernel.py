"""The contract of a kernel: how a problem is solved on a CPU, and how each of its tactics becomes code.

Every kernel is called as

    void name(ptr operands, i64 row_begin, i64 row_end, i64 column_begin, i64 column_end)

operands: the addresses of its inputs, then of its packed constants, then of its outputs. Its work is a grid of
`rows_per_item * batch` rows by `columns`; the caller may cut it at multiples of the steps and run the pieces anywhere.
The batch is thus a run-time extent: row r belongs to item r // rows_per_item.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from engines.backends.llvm.codegen.isa import Isa
from engines.codegen.ir_builder import Function, Module, Value
from engines.codegen.types import I64, PTR
from engines.lowering.problems.problem import Array, Problem
from engines.lowering.problems.view import View

ALIGNMENT = 64                  # of packed constants: a cache line, and the widest vector

P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Window:
    """The bytes of an item that row i of its grid may touch: [begin, end) + i // rows * stride, from its address.

    It may be wider than what is touched, never narrower.
    """
    begin: int
    end: int
    rows: int = 1
    stride: int = 0

    @staticmethod
    def whole(view: View) -> Window:
        """Every row may touch all of the item."""
        return Window(*view.reach)

    @staticmethod
    def along(view: View, axis: int = 0, rows: int = 1, step: int = 1, first: int = 0, count: int = 1) -> Window:
        """`rows` neighbours touch `count` indices of an axis, from `first` on; the next ones, `step` further on."""
        stride = view.strides[axis]
        begin, end = replace(view, shape=(*view.shape[:axis], 1, *view.shape[axis + 1:])).reach
        low, high = sorted((first * stride, (first + count - 1) * stride))
        return Window(begin + low, end + high, rows, step * stride)


@dataclass(frozen=True)
class Grid:
    """The work of a kernel: `rows_per_item` rows for each item of the batch, by `columns`."""
    rows_per_item: int
    row_step: int = 1
    columns: int = 1
    column_step: int = 1


@dataclass(frozen=True)
class Tactic:
    """One way to cut the loops of a kernel. Families extend it; str() is what a user reads."""

    def __str__(self) -> str:
        return "default"


@dataclass(frozen=True)
class Kernel(ABC, Generic[P]):
    """One way to solve a problem on a CPU, with the tactics that it may be cut by.

    items: of the batches that its tactics are for, where `by_batch`; else 1.
    """
    problem: P
    items: int = 1
    # Whether packing only reorders the constants, which is quick: it neither computes with their values nor looks at
    # them.
    packing_is_permutation: ClassVar[bool] = True

    @property
    def by_batch(self) -> bool:
        """Whether its tiles hold pixels of several items: which tactic is fastest then depends on the batch."""
        return False

    def for_batches_of(self, items: int) -> Kernel[P]:
        """The same kernel with tactics for batches of up to so many items; itself, unless it is cut by batch."""
        return replace(self, items=items) if self.by_batch else self

    def applies(self, isa: Isa) -> bool:
        """Whether the kernel can solve the problem on this machine."""
        return True

    def tactics(self, isa: Isa) -> Sequence[Any]:
        """The candidates; none where the kernel cannot solve the problem on this machine.

        Without timing the one of least cost is taken, the first of equals; with it, those that cost far more than the
        least are not timed.
        """
        return (Tactic(),)

    def cost(self, isa: Isa, tactic: Any) -> float:
        """Cycles of one item, roughly (see tuning/cost.py); kernels of one tactic need not say."""
        return 0.0

    def refinements(self, isa: Isa, best: Any) -> Sequence[Any]:
        """Variants of the fastest of `tactics`, to be timed in a second round."""
        return ()

    def constant_bytes(self, isa: Isa, tactic: Any) -> int:
        """Bytes of packed constants that the kernel reads, where they are more than a few."""
        return 0

    def code_size(self, isa: Isa, tactic: Any) -> int:
        """Return the number of outputs that the tactic's micro-kernels compute, all of them together.

        Code, and so the time to compile it, grows with it. 0: the code is short.
        """
        return 0

    def unseen(self, isa: Isa, tactic: Any) -> float:
        """What remains of a tactic's time inside a network, as far as timing it alone cannot show: there its constants
        and inputs are at hand, for it was the last to use them. Where nothing is timed, `cost`
        says it."""
        return 1.0

    def packing(self, tactic: Any) -> Any:
        """What of a tactic decides how constants are packed: tactics equal in it share packed constants."""
        return tactic

    def packing_anywhere(self, tactic: Any) -> Any:
        """What decides, with their values, how constants are packed and expanded at any shapes: of kernels of large
        weights, for which it pays to look whether they were packed before. None: of the others."""
        return None

    @abstractmethod
    def grid(self, isa: Isa, tactic: Any) -> Grid:
        """How the work is cut."""

    def windows(self, isa: Isa, tactic: Any) -> Sequence[Window]:
        """What a row of the grid touches of each input and output: so much must be there before the row may run, and
        so much is there after it. Kernels narrow this; here a row may touch all of its item."""
        return [Window.whole(view) for view in (*self.problem.inputs, *self.problem.outputs)]

    @abstractmethod
    def emit(self, module: Module, name: str, isa: Isa, tactic: Any) -> None:
        """Write the kernel, and the micro-kernels it calls, into the module."""

    def pack(self, isa: Isa, tactic: Any, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """The problem's constants in the order and layout that the kernel reads, or smaller ones that are expanded."""
        return ()

    def expansions(self, isa: Isa, tactic: Any) -> Mapping[int, Problem]:
        """The packed constants, by their number, that a plan's file holds smaller than the kernel reads them, and the
        problem that computes the larger one when the plan is loaded: of one dense input, one dense output and no
        constants. The constant is as many of its items as it takes."""
        return {}

    def expanded_constants(self, isa: Isa, tactic: Any, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """The packed constants as the kernel reads them."""
        expansions = self.expansions(isa, tactic)
        return tuple(_expand(expansions[which], array) if which in expansions else array
                     for which, array in enumerate(self.pack(isa, tactic, constants)))


KERNELS: dict[type[Problem], list[type[Kernel[Any]]]] = {}
K = TypeVar("K", bound=type[Kernel[Any]])


def solves(problem: type[Problem]) -> Callable[[K], K]:
    """Registers a kernel for problems of a class. Where there are several, the tuner chooses; of equals, the first."""
    def register(kernel: K) -> K:
        KERNELS.setdefault(problem, []).append(kernel)
        return kernel
    return register


def kernels_for(problem: Problem, items: int = 1) -> list[Kernel[Any]]:
    """The kernels that may solve the problem, with tactics for batches of up to `items`."""
    return [kernel(problem).for_batches_of(items) for kernel in KERNELS[type(problem)]]


def _expand(problem: Problem, kept: Array) -> Array:
    """The larger constant by the problem's reference; the last item of the smaller is filled up with zeros."""
    (view,), flat = problem.inputs, kept.reshape(-1)
    whole = np.pad(flat, (0, -flat.nbytes % view.item // view.size))
    return problem.reference([whole.reshape(-1, *view.shape)], {})[0].reshape(-1)


def begin_kernel(module: Module, name: str, count: int) -> tuple[Function, list[Value], list[Value]]:
    """A kernel with `count` operands: (f, their addresses, [row_begin, row_end, column_begin, column_end])."""
    f = module.function(name, operands=PTR, row_begin=I64, row_end=I64, column_begin=I64, column_end=I64)
    table, *bounds = f.parameters.values()
    if module.trace:
        f.table.begin(table.name, count)
    addresses = [f.load(PTR, table + 8 * i, align=8, hint=f"operand {i}") for i in range(count)]
    return f, addresses, bounds


def pack_channels(constants: Sequence[Array], channels: int, panels: Sequence[Sequence[Sequence[int]]]) -> Array:
    """Per-channel float32 constants -> [panel][constant][vector][lane].

    `panels`: for each panel its Lanes.order() shifted to absolute channels; absent channels become 0.
    """
    table = np.zeros((len(constants), channels + 1), np.float32)
    for row, constant in zip(table, constants, strict=True):
        row[:channels] = constant
    flat = [table[:, np.minimum(np.asarray(order), channels)].ravel() for order in panels]
    return np.concatenate(flat) if flat else np.zeros(0, np.float32)
