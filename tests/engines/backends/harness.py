"""Runs a kernel on tensors that end at an unreadable page, and checks that it writes nothing beside its output."""
from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from engines.backends.llvm.codegen.compile import LoadedKernel, runs_here
from engines.backends.llvm.codegen.ir_builder import Module
from engines.backends.llvm.codegen.isa import ALL, AVX2, AVX512_VNNI, PORTABLE, Isa
from engines.backends.llvm.kernels.kernel import ALIGNMENT, Kernel, Window, kernels_for
from engines.lowering.epilogue.program import EpilogueProgram, ProgramBuilder
from engines.lowering.problems.problem import Array, Problem
from engines.lowering.problems.view import View, dense_view
from tests.engines.backends.llvm.emulation import EMULATION

EVERY_ISA = pytest.mark.parametrize("isa", ALL, ids=lambda isa: isa.name)
# For kernels without dot products: there the machines differ in their lanes and packs only.
EVERY_WIDTH = pytest.mark.parametrize("isa", [AVX512_VNNI, AVX2, PORTABLE], ids=lambda isa: isa.name)
UNTOUCHED = 0xA5        # what lies around an output

_NUMPY = {"bfloat16": "uint16"}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(_NUMPY.get(dtype, dtype))


def guarded(size: int, slack: int = 0) -> Array:
    """uint8[size + slack], zero, directly before a page that cannot be touched (where the system lets us)."""
    page = mmap.PAGESIZE
    pages = -(-(size + slack) // page) * page
    raw = np.frombuffer(mmap.mmap(-1, pages + page), np.uint8)
    if sys.platform == "linux":
        status = ctypes.CDLL(None).mprotect(ctypes.c_void_p(raw.ctypes.data + pages), ctypes.c_size_t(page), 0)
        assert status == 0
    return raw[pages - size - slack:pages]


def constants_of(array: Array) -> Array:
    """An aligned copy that ends at a guard page, give or take the alignment."""
    flat = np.ascontiguousarray(array).reshape(-1)
    size = -(-flat.nbytes // ALIGNMENT) * ALIGNMENT
    result = guarded(size)[:flat.nbytes].view(flat.dtype)
    result[:] = flat
    return result


def extent(view: View, batch: int) -> int:
    """Bytes from a view's address to its last element's end."""
    return view.size + (batch - 1) * view.item + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))


def window(view: View, memory: Array, batch: int) -> Array:
    """The view's elements in memory as an array [batch, *shape]."""
    dtype = numpy_dtype(view.dtype)
    flat = memory[:extent(view, batch) // dtype.itemsize * dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(flat, (batch, *view.shape), (view.item, *view.strides))


def kernel_of(problem: Problem | Kernel[Any]) -> Kernel[Any]:
    """The first kernel that solves a problem."""
    return problem if isinstance(problem, Kernel) else kernels_for(problem)[0]


@cache
def loaded(kernel: Kernel[Any], isa: Isa, tactic: Any, native: bool) -> LoadedKernel:
    module = Module(None if native else EMULATION)
    kernel.emit(module, "kernel", isa, tactic)
    return LoadedKernel(module.text(), "kernel", isa, emulate=not native)


def random_array(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    """Any byte for integers; floats around 0 that the dtype holds."""
    if dtype in ("uint8", "int8"):
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max + 1, shape).astype(dtype)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype in ("int32", "int64"):
        return random.integers(-1000, 1000, shape).astype(dtype)
    floats = random.standard_normal(shape).astype(np.float32)
    if dtype == "bfloat16":
        return (floats.view(np.uint32) >> 16).astype(np.uint16)
    return floats.astype(dtype)


def run(problem: Problem | Kernel[Any], isa: Isa, inputs: list[Array], constants: dict[str, Any], tactic: Any = None,
        pieces: int = 1, native: bool | None = None, slack: int = 0) -> list[Array]:
    """The outputs [batch, *shape]; the grid is done in `pieces` calls, last piece first."""
    batch, solved = len(inputs[0]), kernel_of(problem)
    spec = solved.problem
    tactic = solved.tactics(isa)[0] if tactic is None else tactic
    native = runs_here(isa) and bool(isa.requires) if native is None else native
    kernel = loaded(solved, isa, tactic, native)
    placed = []
    for view, array in zip(spec.inputs, inputs, strict=True):
        memory = guarded(extent(view, batch), slack)
        memory[:] = random_array(np.random.default_rng(1), "uint8", memory.shape)
        window(view, memory, batch)[...] = array
        placed.append(memory)
    results = []
    for view in spec.outputs:
        memory = guarded(extent(view, batch), slack)
        memory[:] = UNTOUCHED
        results.append(memory)
    operands = [*placed, *(constants_of(c) for c in solved.expanded_constants(isa, tactic, constants)), *results]
    grid = solved.grid(isa, tactic)
    cuts = _cuts(grid.rows_per_item * batch, grid.row_step, pieces)
    sides = _cuts(grid.columns, grid.column_step, pieces)
    for rows in reversed(cuts):
        for columns in reversed(sides):
            kernel(operands, rows, columns)
    computed = [memory.copy() for memory in results]
    outputs = []
    for view, memory in zip(spec.outputs, results, strict=True):
        outputs.append(window(view, memory, batch).copy())
        plain = replace(view, dtype=f"int{8 * view.size}" if view.size in (1, 4, 8) else "bfloat16")
        window(plain, memory, batch)[...] = np.frombuffer(bytes([UNTOUCHED] * view.size), numpy_dtype(plain.dtype))[0]
        assert (memory == UNTOUCHED).all(), "the kernel wrote beside its output"
    check_windows(solved, isa, tactic, kernel, [*operands[:-len(results)], *computed], batch)
    return outputs


def check_windows(solved: Kernel[Any], isa: Isa, tactic: Any, kernel: LoadedKernel, operands: list[Array],
                  batch: int) -> None:
    """A row of the grid writes within its windows, and what is outside of them is nothing to it.

    operands: as the kernel was just run with, its results in the last ones.
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
    """Which bytes of the memory some of the rows may touch."""
    inside = np.zeros(len(memory), bool)
    for row in rows:
        at = row // period * view.item + row % period // window.rows * window.stride
        inside[max(at + window.begin, 0):max(at + window.end, 0)] = True
    return inside


def _cuts(extent: int, step: int, pieces: int) -> list[tuple[int, int]]:
    size = -(-extent // (pieces * step)) * step
    return [(start, min(start + size, extent)) for start in range(0, extent, size)]


def check(problem: Problem | Kernel[Any], isa: Isa, inputs: list[Array], constants: dict[str, Any],
          tolerance: float = 0, **options: Any) -> None:
    """The kernel equals its reference: bit for bit, or within `tolerance` (relative and absolute) for floats."""
    results = run(problem, isa, inputs, constants, **options)
    for got, expected in zip(results, kernel_of(problem).problem.reference(inputs, constants), strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        if tolerance:
            np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), tolerance, tolerance)
        else:
            np.testing.assert_array_equal(got, expected)


def gapped(dtype: str, shape: tuple[int, ...], gap: int = 1) -> View:
    """A view into a larger tensor: `gap` more elements on every axis but the innermost."""
    larger = dense_view(dtype, (*(n + gap for n in shape[:-1]), shape[-1]))
    return View(dtype, shape, larger.strides, larger.item)


def requantise(channels: int, random: np.random.Generator, scale: float = 1.0, residual: bool = False,
               accumulator: bool = True) -> tuple[EpilogueProgram, dict[str, Any]]:
    """value * scale[c] + bias[c] (+ residual * 0.5), clamped below at 3: a typical epilogue, and its constants."""
    b = ProgramBuilder(accumulator)
    first = b.accumulator if accumulator else b.operand()
    value = b.add("fma", first, b.constant(random.uniform(0.5, 1.5, channels) * scale),
                  b.constant(random.uniform(20, 90, channels)))
    if residual:
        value = b.add("fma", b.operand(), 0.5, value)
    b.add("max", value, 3.0)
    return b.program(), {"program": b.constants}
