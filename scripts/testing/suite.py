"""Runner of problems on tensors that end at an unreadable page, with a check for writes outside of outputs."""
from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from infer_server.engines.lowering.epilogue.program import EpilogueProgram, ProgramBuilder
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View, dense_view

UNTOUCHED = 0xA5        # fill of the bytes around an output

_NUMPY = {"bfloat16": "uint16"}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(_NUMPY.get(dtype, dtype))


def guarded(size: int, slack: int = 0) -> Array:
    """Return zeros uint8[size + slack] directly before a page that cannot be accessed, if the system supports it."""
    page = mmap.PAGESIZE
    pages = -(-(size + slack) // page) * page
    raw = np.frombuffer(mmap.mmap(-1, pages + page), np.uint8)
    if sys.platform == "linux":
        status = ctypes.CDLL(None).mprotect(ctypes.c_void_p(raw.ctypes.data + pages), ctypes.c_size_t(page), 0)
        assert status == 0
    return raw[pages - size - slack:pages]


def extent(view: View, batch: int) -> int:
    """Return the bytes from a view's address to the end of its last element."""
    return view.size + (batch - 1) * view.item + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))


def window(view: View, memory: Array, batch: int) -> Array:
    """Return the view's elements in memory as an array [batch, *shape]."""
    dtype = numpy_dtype(view.dtype)
    flat = memory[:extent(view, batch) // dtype.itemsize * dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(flat, (batch, *view.shape), (view.item, *view.strides))


def random_array(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    """Draw any byte for byte types, integers up to 1000, or normal floats that the dtype can represent."""
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


class Runner(Protocol):
    """Interface by which a backend runs one problem. RUNNERS (runners.py) lists the backends of the suite."""
    @property
    def name(self) -> str: ...

    @property
    def lanes(self) -> int:
        """Return the number of elements of a vector, for lowering."""

    def ways(self, problem: Problem) -> list[Any]:
        """Return all kernels of the backend for a problem; the suite runs each."""

    def execute(self, problem: Any, inputs: list[Array], outputs: list[Array], constants: dict[str, Any], batch: int,
                **options: Any) -> None:
        """Run a problem on tensors in memory, from their first bytes on. options: options of the backend."""


def run(problem: Any, runner: Runner, inputs: list[Array], constants: dict[str, Any], slack: int = 0,
        **options: Any) -> list[Array]:
    """Return the outputs [batch, *shape] of a problem, or of one of the backend's kernels for it.

    slack: bytes past the inputs' ends that may be read.
    """
    batch, solved = len(inputs[0]), getattr(problem, "problem", problem)
    arrays = []
    for view, array in zip(solved.inputs, inputs, strict=True):
        memory = guarded(extent(view, batch), slack)
        memory[:] = random_array(np.random.default_rng(1), "uint8", memory.shape)
        window(view, memory, batch)[...] = array
        arrays.append(memory)
    results = []
    for view in solved.outputs:
        memory = guarded(extent(view, batch), slack)
        memory[:] = UNTOUCHED
        results.append(memory)
    before = [memory.copy() for memory in arrays]
    runner.execute(problem, arrays, results, constants, batch, **options)
    assert all((memory == kept).all() for memory, kept in zip(arrays, before, strict=True)), "an input was written to"
    outputs = []
    for view, memory in zip(solved.outputs, results, strict=True):
        outputs.append(window(view, memory, batch).copy())
        plain = replace(view, dtype=f"int{8 * view.size}" if view.size in (1, 4, 8) else "bfloat16")
        window(plain, memory, batch)[...] = np.frombuffer(bytes([UNTOUCHED] * view.size), numpy_dtype(plain.dtype))[0]
        assert (memory == UNTOUCHED).all(), "something was written beside an output"
    return outputs


def check(problem: Any, runner: Runner, inputs: list[Array], constants: dict[str, Any], tolerance: float = 0,
          **options: Any) -> None:
    """Assert that the outputs equal the problem's reference bit for bit, or within `tolerance` if one is given."""
    results = run(problem, runner, inputs, constants, **options)
    expected = getattr(problem, "problem", problem).reference(inputs, constants)
    for got, desired in zip(results, expected, strict=True):
        assert got.dtype == desired.dtype and got.shape == desired.shape
        if tolerance:
            np.testing.assert_allclose(got.astype(np.float64), desired.astype(np.float64), tolerance, tolerance)
        else:
            np.testing.assert_array_equal(got, desired)


def gapped(dtype: str, shape: tuple[int, ...], gap: int = 1) -> View:
    """Return a view into a larger tensor: `gap` more elements on every axis but the innermost."""
    larger = dense_view(dtype, (*(n + gap for n in shape[:-1]), shape[-1]))
    return View(dtype, shape, larger.strides, larger.item)


def requantise(channels: int, random: np.random.Generator, scale: float = 1.0, residual: bool = False,
               accumulator: bool = True) -> tuple[EpilogueProgram, dict[str, Any]]:
    """Return a typical epilogue and its constants: value * scale[c] + bias[c] (+ residual * 0.5), at least 3."""
    b = ProgramBuilder(accumulator)
    first = b.accumulator if accumulator else b.operand()
    value = b.add("fma", first, b.constant(random.uniform(0.5, 1.5, channels) * scale),
                  b.constant(random.uniform(20, 90, channels)))
    if residual:
        value = b.add("fma", b.operand(), 0.5, value)
    b.add("max", value, 3.0)
    return b.program(), {"program": b.constants}
