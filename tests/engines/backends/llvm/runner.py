"""Runner of kernels on the CPU, split into pieces; missing instruction sets are emulated."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm import kernels  # noqa: F401  (fills KERNELS)
from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, Kernel, Window, kernels_for
from infer_server.engines.backends.llvm.tuning.dynamic import dynamic_kernel, spelling
from infer_server.engines.codegen.extents import KernelTrace, operand_values
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.ir.polynomials import value
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View
from infer_server.engines.plan.plan import SLACK
from scripts.testing.suite import UNTOUCHED, guarded, random_array
from tests.engines.backends.llvm.emulation import EMULATION
from tests.engines.backends.llvm.jit import LoadedKernel, runs_here

Called = Callable[[list[Array], tuple[int, int], tuple[int, int]], None]      # operands, rows, columns of the grid


def constants_of(array: Array) -> Array:
    """Return an aligned copy that ends at a guard page, up to the alignment."""
    flat = np.ascontiguousarray(array).reshape(-1)
    size = -(-flat.nbytes // ALIGNMENT) * ALIGNMENT
    result = guarded(size)[:flat.nbytes].view(flat.dtype)
    result[:] = flat
    return result


def kernel_of(problem: Problem | Kernel[Any]) -> Kernel[Any]:
    """Return the first kernel that solves a problem."""
    return problem if isinstance(problem, Kernel) else kernels_for(problem)[0]


@cache
def loaded(kernel: Kernel[Any], isa: Isa, tactic: Any, native: bool) -> LoadedKernel:
    module = Module(None if native else EMULATION)
    kernel.emit(module, "kernel", isa, tactic)
    return LoadedKernel(module.text(), "kernel", isa, emulate=not native)


@dataclass(frozen=True)
class CpuRunner:
    """Runner on one instruction set."""
    isa: Isa

    @property
    def name(self) -> str:
        return self.isa.name

    @property
    def lanes(self) -> int:
        return self.isa.lanes

    def ways(self, problem: Problem) -> list[Kernel[Any]]:
        return [kernel for kernel in kernels_for(problem) if kernel.tactics(self.isa)]

    def loaded(self, kernel: Kernel[Any], tactic: Any, native: bool) -> Called:
        return loaded(kernel, self.isa, tactic, native)

    def execute(self, problem: Problem | Kernel[Any], inputs: list[Array], outputs: list[Array],
                constants: dict[str, Any], batch: int, tactic: Any = None, pieces: int = 1,
                native: bool | None = None) -> None:
        """Run a problem's first kernel by its first tactic, unless others are given.

        The grid is run in `pieces` calls, the last piece first.
        """
        solved, isa = kernel_of(problem), self.isa
        tactic = solved.tactics(isa)[0] if tactic is None else tactic
        native = runs_here(isa) if native is None else native
        kernel = self.loaded(solved, tactic, native)
        packed = [constants_of(c) for c in solved.expanded_constants(isa, tactic, constants)]
        grid = solved.grid(isa, tactic)
        for rows in reversed(_cuts(grid.rows_per_item * batch, grid.row_step, pieces)):
            for columns in reversed(_cuts(grid.columns, grid.column_step, pieces)):
                kernel([*inputs, *packed, *outputs], rows, columns)
        check_windows(solved, isa, tactic, kernel, [*inputs, *packed, *(memory.copy() for memory in outputs)], batch)


@dataclass(frozen=True)
class DynamicRunner(CpuRunner):
    """Runner of dynamic kernels, which take all numbers of a problem that their code does not need at run time."""

    @property
    def name(self) -> str:
        return f"{self.isa.name}, dynamic"

    def loaded(self, kernel: Kernel[Any], tactic: Any, native: bool) -> Called:
        run, table = loaded_dynamic(kernel, self.isa, tactic, native)

        def called(operands: list[Array], rows: tuple[int, int], columns: tuple[int, int]) -> None:
            """Run on copies of the inputs followed by SLACK, since the last vector of a row is read whole."""
            inputs = len(kernel.problem.inputs)
            spacious = [guarded(len(memory), SLACK) for memory in operands[:inputs]]
            for memory, given in zip(spacious, operands, strict=False):
                memory[:len(given)] = given
            run([*spacious, *operands[inputs:], table], rows, columns)

        return called


@cache
def loaded_dynamic(kernel: Kernel[Any], isa: Isa, tactic: Any, native: bool) -> tuple[LoadedKernel, Array]:
    """Compile a dynamic kernel; return it and its table of run-time numbers."""
    trace, numbers = KernelTrace(), spelling(kernel).numbers
    module = Module(None if native else EMULATION, trace)
    dynamic_kernel(kernel, trace, frozenset(range(len(numbers)))).emit(module, "kernel", isa, tactic)
    operands = operand_values(trace.operands, numbers)
    for (relation, number), answer in trace.guards.items():
        assert (value(number, operands) == 0 if relation == "==" else value(number, operands) < 0) == answer
    table = np.array([value(number, operands) for number in trace.table] or [0], np.int64)
    return LoadedKernel(module.text(), "kernel", isa, emulate=not native), constants_of(table)


def check_windows(solved: Kernel[Any], isa: Isa, tactic: Any, kernel: Called, operands: list[Array],
                  batch: int) -> None:
    """Check that a row of the grid writes only within its windows and does not depend on bytes outside them.

    operands: those that the kernel was just run with, results last.
    """
    spec, grid, windows = solved.problem, solved.grid(isa, tactic), list(solved.windows(isa, tactic))
    total, inputs, count = grid.rows_per_item * batch, len(spec.inputs), len(spec.outputs)
    for first in sorted({0, total // 2 // grid.row_step * grid.row_step, (total - 1) // grid.row_step * grid.row_step}):
        rows = range(first, min(first + grid.row_step, total))
        seen = []
        for view, window, memory in zip(spec.inputs, windows, operands, strict=False):
            noise = random_array(np.random.default_rng(first), "uint8", memory.shape)
            inside = _inside(view, window, memory, rows, grid.rows_per_item)
            seen.append(guarded(len(memory)))
            seen[-1][:] = np.where(inside, memory, noise)
        written = [guarded(len(memory)) for memory in operands[-count:]]
        for memory in written:
            memory[:] = UNTOUCHED
        kernel([*seen, *operands[inputs:-count], *written], (rows.start, rows.stop), (0, grid.columns))
        for view, window, memory, full in zip(spec.outputs, windows[inputs:], written, operands[-count:], strict=True):
            touched = memory != UNTOUCHED
            assert not (touched & ~_inside(view, window, memory, rows, grid.rows_per_item)).any(), \
                f"rows {rows} write outside {window}"
            assert (memory[touched] == full[touched]).all(), f"rows {rows} read outside {windows[:inputs]}"


def _inside(view: View, window: Window, memory: Array, rows: range, period: int) -> Array:
    """Return a mask of the bytes of the memory that these rows may touch."""
    inside = np.zeros(len(memory), bool)
    for row in rows:
        at = row // period * view.item + row % period // window.rows * window.stride
        inside[max(at + window.begin, 0):max(at + window.end, 0)] = True
    return inside


def _cuts(extent: int, step: int, pieces: int) -> list[tuple[int, int]]:
    size = -(-extent // (pieces * step)) * step
    return [(start, min(start + size, extent)) for start in range(0, extent, size)]
