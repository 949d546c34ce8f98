"""The contract of a kernel: how a problem is solved on a GPU, and how each of its tactics becomes code.

Every kernel is called as

    void name(operands..., u32 rows)

operands: the addresses of its inputs, then of its packed constants, then of its outputs. Its work is a grid of
`rows_per_item * items` rows by `columns`; a block of `threads` threads makes `row_step` rows by `column_step` columns,
ctaid.x counting the rows and ctaid.y the columns. The batch is thus known at run time only: row r belongs to item
r // rows_per_item, and there are `rows` of them.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from engines.backends.cuda.codegen.gpu import Gpu
from engines.backends.cuda.codegen.module import GpuModule
from engines.backends.cuda.cost import Card
from engines.lowering.problems.problem import Array, Problem
from engines.lowering.problems.view import View

P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Grid:
    """The work of a kernel, and the blocks that it is cut into."""
    rows_per_item: int
    row_step: int
    threads: int
    columns: int = 1
    column_step: int = 1
    shared_bytes: int = 0

    def blocks(self, items: int) -> tuple[int, int]:
        return -(-self.rows_per_item * items // self.row_step), -(-self.columns // self.column_step)


@dataclass(frozen=True)
class Tactic:
    """One way to cut a kernel into blocks. Families extend it; str() is what a user reads."""

    def __str__(self) -> str:
        return "default"


@dataclass(frozen=True)
class GpuKernel(ABC, Generic[P]):
    """One way to solve a problem on a GPU.

    aligned: what the address of each input, then of each output, is a multiple of. Views know strides; where in a
    buffer a tensor begins, they do not.
    """
    problem: P
    gpu: Gpu
    aligned: tuple[int, ...]

    @property
    def refusal(self) -> str:
        """Why the kernel cannot solve the problem on this GPU; "" if it can."""
        return ""

    def tactics(self) -> Sequence[Any]:
        """The candidates, of which the `cheapest` is taken where nothing can be timed."""
        return (Tactic(),)

    def cost(self, tactic: Any, card: Card, items: int) -> float:
        """Seconds of a launch for so many items, roughly: without a word of its kernel, what moving its bytes takes, or
        making its products one after the other in every thread."""
        rows, columns = (grid := self.grid(tactic)).blocks(items)
        return max(card.moving(self.problem.bytes * items),
                   card.by_thread(self.problem.macs * items, rows * columns * grid.threads))

    @abstractmethod
    def grid(self, tactic: Any) -> Grid:
        """How the work is cut."""

    @abstractmethod
    def emit(self, module: GpuModule, name: str, tactic: Any) -> None:
        """Write the kernel into the module."""

    def pack(self, tactic: Any, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """The problem's constants in the order and layout that the kernel reads."""
        return ()

    def aligned_views(self) -> list[tuple[View, int]]:
        """Inputs, then outputs, each with its alignment."""
        return list(zip((*self.problem.inputs, *self.problem.outputs), self.aligned, strict=True))


KERNELS: dict[type[Problem], type[GpuKernel[Any]]] = {}
K = TypeVar("K", bound=type[GpuKernel[Any]])


def solves(*problems: type[Problem]) -> Callable[[K], K]:
    """Registers a kernel for problems of these classes."""
    def register(kernel: K) -> K:
        for problem in problems:
            assert problem not in KERNELS, f"two kernels for {problem.__name__}"
            KERNELS[problem] = kernel
        return kernel
    return register


def kernel_for(problem: Problem, gpu: Gpu, aligned: tuple[int, ...]) -> GpuKernel[Any] | None:
    """The kernel that solves the problem; None if its family has none."""
    found = KERNELS.get(type(problem))
    return found(problem, gpu, aligned) if found else None


def cheapest(kernel: GpuKernel[Any], card: Card, items: int) -> Any:
    """The tactic that costs least for so many items; the first of equals."""
    return min(kernel.tactics(), key=lambda tactic: kernel.cost(tactic, card, items))
