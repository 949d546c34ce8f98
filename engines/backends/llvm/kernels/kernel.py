"""Interface of CPU kernels: how a kernel solves a problem, and how each of its tactics becomes LLVM IR.

Every kernel is called as

    void name(ptr operands, i64 row_begin, i64 row_end, i64 column_begin, i64 column_end)

operands: the addresses of its inputs, then of its packed constants, then of its outputs. Its work is a grid of
`rows_per_item * batch` rows by `columns`, which the caller may split at multiples of the steps; the pieces may run in
any order and on any thread. The batch size is thus a run-time number: row r belongs to item r // rows_per_item.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I64, PTR
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View

ALIGNMENT = 64                  # bytes, of packed constants: a cache line, and the widest vector

P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Window:
    """Byte range of an item that a row of the grid may access.

    Row i may access [begin, end) + i // rows * stride, from the item's address. The range may be wider than what is
    accessed, but never narrower.
    """
    begin: int
    end: int
    rows: int = 1
    stride: int = 0

    @staticmethod
    def whole(view: View) -> Window:
        """Return the window of a kernel whose rows may each access all of the item."""
        return Window(*view.reach)

    @staticmethod
    def along(view: View, axis: int = 0, rows: int = 1, step: int = 1, first: int = 0, count: int = 1) -> Window:
        """Return the window of a kernel whose rows access a range of indices of one axis.

        Parameters
        ----------
        view : tensor that is accessed.
        axis : axis of the view.
        rows : consecutive grid rows that access one range.
        step : indices by which the next `rows` rows are further on.
        first, count : first index, and number of indices, that the first rows access.
        """
        stride = view.strides[axis]
        begin, end = replace(view, shape=(*view.shape[:axis], 1, *view.shape[axis + 1:])).reach
        low, high = sorted((first * stride, (first + count - 1) * stride))
        return Window(begin + low, end + high, rows, step * stride)


@dataclass(frozen=True)
class Grid:
    """Work of a kernel: `rows_per_item` rows for each item of the batch, by `columns`.

    row_step, column_step: the grid may be split only at multiples of these.
    """
    rows_per_item: int
    row_step: int = 1
    columns: int = 1
    column_step: int = 1


@dataclass(frozen=True)
class Tactic:
    """Choice of tile sizes and other variants of a kernel. Families extend it; str() is the name that users see."""

    def __str__(self) -> str:
        return "default"


@dataclass(frozen=True)
class Kernel(ABC, Generic[P]):
    """Base class of kernels: one way to solve a problem on a CPU, in several tactics.

    items: the batch size that the tactics are made for, if `by_batch`; else 1.
    """
    problem: P
    items: int = 1
    # True if packing only reorders the constants, without arithmetic or decisions on their values, so that it is cheap.
    packing_is_permutation: ClassVar[bool] = True

    @property
    def by_batch(self) -> bool:
        """Return True if tiles hold pixels of several items, so that the fastest tactic depends on the batch size."""
        return False

    def for_batches_of(self, items: int) -> Kernel[P]:
        """Return this kernel with tactics for batches of up to `items`; without `by_batch`, the kernel itself."""
        return replace(self, items=items) if self.by_batch else self

    def applies(self, isa: Isa) -> bool:
        """Return True if the kernel can solve the problem on this machine."""
        return True

    def tactics(self, isa: Isa) -> Sequence[Any]:
        """Return the candidate tactics; none if the kernel cannot solve the problem on this machine.

        Without timing, the tuner takes the one of least cost, the first if several are equal. With timing, it skips
        those that cost far more than the least.
        """
        return (Tactic(),)

    def cost(self, isa: Isa, tactic: Any) -> float:
        """Return the estimated cycles of one item (see common/cost.py).

        Kernels with a single tactic need not override it.
        """
        return 0.0

    def refinements(self, isa: Isa, best: Any) -> Sequence[Any]:
        """Return variants of the fastest of `tactics`, to be timed in a second round."""
        return ()

    def constant_bytes(self, isa: Isa, tactic: Any) -> int:
        """Return the size in bytes of the packed constants, or 0 if they are small."""
        return 0

    def code_size(self, isa: Isa, tactic: Any) -> int:
        """Return the number of outputs that the tactic's micro-kernels compute, all of them together.

        Code, and so the time to compile it, grows with it. 0: the code is short.
        """
        return 0

    def unseen(self, isa: Isa, tactic: Any) -> float:
        """Return the factor that turns the time of a tactic alone into its time inside a network.

        In a network constants and inputs may have left the caches, for other kernels ran in between; a tactic that
        prefetches gains there what timing it alone cannot show. Without timing, `cost` accounts for it.
        """
        return 1.0

    def packing(self, tactic: Any) -> Any:
        """Return the part of a tactic that decides the layout of packed constants.

        Tactics equal in it share packed constants.
        """
        return tactic

    def packing_anywhere(self, tactic: Any) -> Any:
        """Return a key such that equal keys and equal constants pack and expand to equal bytes, whatever the shapes.

        Kernels with large weights return one, so that weights packed before are reused. None: do not look for packed
        weights.
        """
        return None

    @abstractmethod
    def grid(self, isa: Isa, tactic: Any) -> Grid:
        """Return the grid of the work."""

    def windows(self, isa: Isa, tactic: Any) -> Sequence[Window]:
        """Return the window of each input and output that a row of the grid accesses.

        The executor starts a row when its input windows are complete. By default a row may access all of its item.
        """
        return [Window.whole(view) for view in (*self.problem.inputs, *self.problem.outputs)]

    @abstractmethod
    def emit(self, module: Module, name: str, isa: Isa, tactic: Any) -> None:
        """Write the kernel, and the micro-kernels that it calls, into the module."""

    def pack(self, isa: Isa, tactic: Any, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return the constants in the layout that the kernel reads, or smaller ones that are expanded at load time."""
        return ()

    def expansions(self, isa: Isa, tactic: Any) -> Mapping[int, Problem]:
        """Return the problems that expand constants which a plan file stores in a smaller form.

        The keys are the numbers of the packed constants. Each problem has one dense input, one dense output and no
        constants. It runs when the plan is loaded, on as many items as the constant holds.
        """
        return {}

    def expanded_constants(self, isa: Isa, tactic: Any, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return the packed constants in the form that the kernel reads."""
        expansions = self.expansions(isa, tactic)
        return tuple(_expand(expansions[which], array) if which in expansions else array
                     for which, array in enumerate(self.pack(isa, tactic, constants)))


KERNELS: dict[type[Problem], list[type[Kernel[Any]]]] = {}
K = TypeVar("K", bound=type[Kernel[Any]])


def solves(problem: type[Problem]) -> Callable[[K], K]:
    """Register a kernel class for problems of a class.

    Among several kernels of a problem the tuner chooses; the first registered wins if their costs are equal.
    """
    def register(kernel: K) -> K:
        KERNELS.setdefault(problem, []).append(kernel)
        return kernel
    return register


def kernels_for(problem: Problem, items: int = 1) -> list[Kernel[Any]]:
    """Return the kernels that may solve the problem, with tactics for batches of up to `items`."""
    return [kernel(problem).for_batches_of(items) for kernel in KERNELS[type(problem)]]


def _expand(problem: Problem, kept: Array) -> Array:
    """Compute the expanded constant by the problem's reference; the last item of the input is padded with zeros."""
    (view,), flat = problem.inputs, kept.reshape(-1)
    whole = np.pad(flat, (0, -flat.nbytes % view.item // view.size))
    return problem.reference([whole.reshape(-1, *view.shape)], {})[0].reshape(-1)


def begin_kernel(module: Module, name: str, count: int) -> tuple[Function, list[Value], list[Value]]:
    """Begin a kernel with `count` operands.

    Return (f, their addresses, [row_begin, row_end, column_begin, column_end]).
    """
    f = module.function(name, operands=PTR, row_begin=I64, row_end=I64, column_begin=I64, column_end=I64)
    table, *bounds = f.parameters.values()
    if module.trace:
        f.table.begin(table.name, count)
    addresses = [f.load(PTR, table + 8 * i, align=8, hint=f"operand {i}") for i in range(count)]
    return f, addresses, bounds


def pack_channels(constants: Sequence[Array], channels: int, panels: Sequence[Sequence[Sequence[int]]]) -> Array:
    """Pack per-channel float32 constants as [panel][constant][vector][lane].

    Parameters
    ----------
    constants : arrays [channels] or [1], float32.
    channels : number of channels; an index from here on is an absent channel, and becomes 0.
    panels : for each panel its Lanes.order(), shifted to absolute channels.
    """
    table = np.zeros((len(constants), channels + 1), np.float32)
    for row, constant in zip(table, constants, strict=True):
        row[:channels] = constant
    flat = [table[:, np.minimum(np.asarray(order), channels)].ravel() for order in panels]
    return np.concatenate(flat) if flat else np.zeros(0, np.float32)
