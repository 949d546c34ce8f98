"""Base of kernels along the innermost axis, with a warp per row.

    lane l has the elements i with i % 32 == l; those with i % 64 < 32 form one partial result, the others a second
    both are combined, then those of lanes 16, 8, 4, 2 and 1 apart

All targets reduce rows in this order (engines/lowering/problems/rows.py), so results are equal bit for bit. Rows of up
to KEPT elements stay in registers between passes.
"""
from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import (
    GpuModule,
    begin_kernel,
    shuffle_xor,
    special_register,
    wide,
)
from infer_server.engines.backends.cuda.kernels.access import (
    load_channels,
    load_constants,
    offset_in,
    run_program,
    store_channels,
)
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import FLOAT, I1, I32
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.rows import NEUTRAL, PARTIALS, RowProblem
from infer_server.engines.lowering.problems.view import View

WARPS = 4               # per block
KEPT = 1 << 10          # elements per row: 32 registers per lane

P = TypeVar("P", bound=RowProblem)


@dataclass(frozen=True)
class At:
    """Element of a row that a lane holds."""
    index: Value
    inside: Value | None        # i1: it is within the row; None: it always is
    key: int = -1               # in kept rows, its number among the lane's elements


class Row:
    """Row processed by a warp."""

    def __init__(self, kernel: OverRows[Any], operands: Sequence[Value], pixel: Value, lane: Value) -> None:
        self.kernel, self.gpu, self.f, self.lane = kernel, kernel.gpu, pixel.f, lane
        self.problem: RowProblem = kernel.problem
        inputs = len(self.problem.inputs)
        views = (*self.problem.inputs, self.problem.y)
        self._at = [operand + offset_in(view, pixel) for view, operand in zip(
            views, (*operands[:inputs], operands[-1]), strict=True)]
        self._tables = operands[inputs:inputs + 2]
        self._kept: dict[int, Value] = {}

    def elements(self, **carried: dict[Any, Value]) -> Iterator[At]:
        """Yield the lane's elements in order, unrolled for kept rows, else in a loop that carries registers."""
        width = self.problem.width
        if width <= KEPT:
            for key, first in enumerate(range(0, width, WARP)):
                index = self.lane + first
                yield At(index, index.below(width) if first + WARP > width else None, key)
            return
        for turn in self.f.loop("elements", -(-width // PARTIALS), **carried):
            start = self.f.cast("trunc", turn, I32, "turn") * PARTIALS + self.lane
            for half in (0, WARP):
                yield At(start + half, (start + half).below(width))

    def x(self, at: At) -> Value:
        """Return an element after the prologue; past the end, the row's first element."""
        if at.key in self._kept:
            return self._kept[at.key]
        value = self.x_at(at.index if at.inside is None else self.f.select(at.inside, at.index, at.index.like(0)))
        if at.key >= 0:
            self._kept[at.key] = value
        return value

    def x_at(self, index: Value) -> Value:
        """Return the element at any index after the prologue."""
        problem = self.problem
        return self._program(problem.prologue, [], range(len(problem.sources)), index, self._tables[0], problem.width)

    def reduce(self, kind: str, value: Callable[[At], Value]) -> Value:
        """Return, in all lanes, the sum, max or min of `value` over all elements."""
        halves = dict.fromkeys((0, 1), self.f.constant(NEUTRAL[kind], FLOAT))
        for number, at in enumerate(self.elements(halves=halves)):
            here = value(at)
            if at.inside is not None:
                here = self.f.select(at.inside, here, here.like(NEUTRAL[kind]), "here")
            halves[number % 2] = self.combined(kind, halves[number % 2], here)
        result = self.combined(kind, halves[0], halves[1])
        for distance in (16, 8, 4, 2, 1):
            result = self.combined(kind, result, shuffle_xor(result, distance))
        return result

    def combined(self, kind: str, a: Value, b: Value) -> Value:
        """Combine two operands of a reduction."""
        return a + b if kind == "sum" else self.gpu.max(a, b) if kind == "max" else self.gpu.min(a, b)

    def store(self, value: Callable[[At], Value]) -> None:
        """Run the program on `value` of every element and store the results."""
        for at in self.elements():
            with self.f.when(at.inside or self.f.constant(1, I1)):
                self._store(value(at), at.index)

    def store_one(self, value: Value) -> None:
        """Run the program on the row's single result and store it."""
        with self.f.when(self.lane.compare("eq", 0)):
            self._store(value, self.lane)

    def _store(self, value: Value, index: Value) -> None:
        problem, split = self.problem, len(self.problem.sources)
        result = self._program(problem.program, [value], range(split, len(problem.inputs)), index, self._tables[1],
                               problem.constants_width)
        store_channels(self.gpu, problem.y, [result], self._at[-1] + wide(index) * problem.y.strides[-1])

    def _program(self, program: EpilogueProgram, sums: list[Value], numbers: range, index: Value, table: Value,
                 width: int) -> Value:
        views: tuple[View, ...] = self.problem.inputs
        values = [load_channels(self.gpu, views[n], self._at[n] + wide(index) * views[n].strides[-1], 1)
                  for n in numbers]
        constants = load_constants(self.f, table, index if width > 1 else index.like(0), 1, program.constants, width)
        return run_program(self.gpu, program, sums, values, constants)[0]


class OverRows(GpuKernel[P]):
    """Kernel whose grid rows are the rows of the problem."""

    @property
    def rows_of_item(self) -> int:
        return math.prod(self.problem.sources[0].shape[:-1])

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return the constants of the prologue and of the program, float32 [constant][width]."""
        problem = self.problem
        return tuple(_table(constants.get(name, ()), width) for name, width in (
            ("prologue", problem.width), ("program", problem.constants_width)))


class RowByWarp(OverRows[P]):
    """Kernel with a warp per row. Subclasses emit the code of a row."""

    def grid(self, tactic: Tactic) -> Grid:
        return Grid(self.rows_of_item, WARPS, WARPS * WARP)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        count = len(self.problem.inputs) + 3
        f, operands, rows = begin_kernel(module, name, WARPS * WARP, count)
        thread = special_register(f, "tid.x")
        row = special_register(f, "ctaid.x") * WARPS + thread.binary("lshr", WARP.bit_length() - 1)
        with f.when(row.below(rows)):       # uniform within a warp
            self.write_row(Row(self, operands, row, thread & WARP - 1))

    @abstractmethod
    def write_row(self, row: Row) -> None:
        ...


def _table(constants: Sequence[Any], width: int) -> Array:
    table = np.zeros((max(len(constants), 1), width), np.float32)
    for row, constant in zip(table, constants, strict=False):
        row[:] = constant
    return table


