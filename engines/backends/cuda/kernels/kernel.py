"""Interface of a GPU kernel: its tactics, their cost, grid, packed constants and code.

Every kernel has the signature

    void name(operands..., u32 rows)

with the addresses of its inputs, packed constants and outputs. The grid has `rows_per_item * items` rows by `columns`;
a block of `threads` threads computes `row_step` rows by `column_step` columns, with ctaid.x along the rows and ctaid.y
along the columns. The batch is known at run time only: row r belongs to item r // rows_per_item, and `rows` bounds r.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.codegen.module import GpuModule
from infer_server.engines.backends.cuda.cost import Card
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View

P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Grid:
    """Size of a kernel's work, and of its blocks."""
    rows_per_item: int
    row_step: int
    threads: int
    columns: int = 1
    column_step: int = 1
    shared_bytes: int = 0

    def blocks(self, items: int) -> tuple[int, int]:
        """Return the numbers of blocks along rows and columns."""
        return -(-self.rows_per_item * items // self.row_step), -(-self.columns // self.column_step)


@dataclass(frozen=True)
class Tactic:
    """Variant of a kernel. Families extend it; str() is shown to users."""

    def __str__(self) -> str:
        return "default"


@dataclass(frozen=True)
class GpuKernel(ABC, Generic[P]):
    """Implementation of a problem on a GPU.

    `aligned` are the alignments in bytes of the addresses of all inputs, then of all outputs. Views know strides only,
    not where a tensor begins in its buffer.
    """
    problem: P
    gpu: Gpu
    aligned: tuple[int, ...]

    @property
    def refusal(self) -> str:
        """Reason why the kernel cannot solve the problem on this GPU, or "" if it can."""
        return ""

    def tactics(self) -> Sequence[Any]:
        """Return the candidate tactics. Without timing, `cheapest` picks one."""
        return (Tactic(),)

    def cost(self, tactic: Any, card: Card, items: int) -> float:
        """Return the estimated seconds of a launch for `items` items.

        The default is the larger of moving all bytes and multiplying thread by thread.
        """
        rows, columns = (grid := self.grid(tactic)).blocks(items)
        return max(card.copy_seconds(self.problem.bytes * items),
                   card.scalar_seconds(self.problem.macs * items, rows * columns * grid.threads))

    @abstractmethod
    def grid(self, tactic: Any) -> Grid:
        """Return the grid of a tactic."""

    @abstractmethod
    def emit(self, module: GpuModule, name: str, tactic: Any) -> None:
        """Emit the kernel into the module."""

    def pack(self, tactic: Any, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return the problem's constants in the kernel's order and layout."""
        return ()

    def aligned_views(self) -> list[tuple[View, int]]:
        """Return inputs, then outputs, each with its alignment."""
        return list(zip((*self.problem.inputs, *self.problem.outputs), self.aligned, strict=True))


KERNELS: dict[type[Problem], type[GpuKernel[Any]]] = {}
K = TypeVar("K", bound=type[GpuKernel[Any]])


def solves(*problems: type[Problem]) -> Callable[[K], K]:
    """Register a kernel for classes of problems."""
    def register(kernel: K) -> K:
        for problem in problems:
            assert problem not in KERNELS, f"two kernels for {problem.__name__}"
            KERNELS[problem] = kernel
        return kernel
    return register


def kernel_for(problem: Problem, gpu: Gpu, aligned: tuple[int, ...]) -> GpuKernel[Any] | None:
    """Return the kernel of a problem, or None if its class has none."""
    found = KERNELS.get(type(problem))
    return found(problem, gpu, aligned) if found else None


def cheapest(kernel: GpuKernel[Any], card: Card, items: int) -> Any:
    """Return the tactic with the least cost for `items` items, the first among equals."""
    return min(kernel.tactics(), key=lambda tactic: kernel.cost(tactic, card, items))
