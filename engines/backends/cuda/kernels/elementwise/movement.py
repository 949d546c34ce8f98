"""Gathers by an index (Take, Lookup, GatherElements), and the fill of halos.

    Take            y[n, o, i, :] = x[n, o, index[i], :]            the index is a packed constant
    Lookup          y[n, i, :] = table[index[n, i], :]              the table is a packed constant
    GatherElements  y[n, i, j] = x[n, i, index[n, i, j]]

Negative indices count from the end; indices past the end are clamped to the last element.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from infer_server.engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special_register, wide
from infer_server.engines.backends.cuda.kernels.access import load_stored, offset_in, pixel_offset, store_stored
from infer_server.engines.backends.cuda.kernels.elementwise.threads import THREADS, ThreadKernel
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import ELEMENTS, I8, I32, I64
from infer_server.engines.lowering.problems.movement import GatherElements, HaloFill, Lookup, Take
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import View


@solves(Take)
class TakeByThreads(ThreadKernel[Take]):
    """Kernel with one thread for a few neighbouring elements."""
    tables = 1

    @property
    def inner(self) -> bool:
        """True if the index is along the innermost axis, so that a thread takes one element."""
        return self.problem.axis == len(self.y.shape) - 1

    @cached_property
    def each(self) -> int:
        return 1 if self.inner else super().each

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return the index as int32, wrapped to non-negative values."""
        return (np.asarray(constants["index"], np.int64).astype(np.int32) % self.problem.x.shape[self.problem.axis],)

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        x, index, _ = operands
        problem, axis = self.problem, self.problem.axis
        if self.inner:
            position = f.load(I32, index + wide(channel) * 4, 4, "index")
            source = x + offset_in(problem.x, pixel) + wide(position) * problem.x.strides[-1]
        else:
            shape = (*problem.y.shape[:-1],)
            strides = [0 if i == axis else s for i, s in enumerate(problem.x.strides[:-1])]
            inner = math.prod(shape[axis + 1:])
            row = pixel.divided(inner).remainder(shape[axis])
            position = f.load(I32, index + wide(row) * 4, 4, "index")
            source = x + pixel_offset(pixel, shape, strides, problem.x.item) + wide(position) * problem.x.strides[axis]
            source = source + wide(channel) * problem.x.strides[-1]
        store_stored(self.y, load_stored(problem.x, source, self.each), self.at(-1, operands, pixel, channel))


@solves(Lookup)
class LookupByThreads(ThreadKernel[Lookup]):
    """Kernel with one thread for a few neighbouring elements of a row."""
    tables = 1

    @property
    def vectors(self) -> Sequence[tuple[View, int]]:
        row = View(self.y.dtype, self.y.shape[-1:], (self.y.size,), self.y.shape[-1] * self.y.size)
        return [(self.y, self.aligned[-1]), (row, 256)]

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return (np.ascontiguousarray(constants["table"]),)

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        index, table, _ = operands
        view = self.problem.index
        at = pixel_offset(pixel, view.shape, view.strides, view.item)
        row = _clamped(f.load(ELEMENTS[view.dtype], index + at, view.size, "index"), self.problem.rows)
        width = self.y.shape[-1] * self.y.size
        source = table + row * width + wide(channel) * self.y.size
        store_stored(self.y, load_stored(self.y, source, self.each), self.at(-1, operands, pixel, channel))


@solves(GatherElements)
class GatherByThreads(ThreadKernel[GatherElements]):
    """Kernel with one thread per element."""
    each = 1

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        problem, axis = self.problem, self.problem.axis
        x, index, _ = operands
        row = f.load(ELEMENTS[problem.index.dtype], self.at(1, operands, pixel, channel), problem.index.size, "index")
        row = _clamped(row, problem.x.shape[axis])
        strides = [0 if i == axis else s for i, s in enumerate(problem.x.strides)]
        source = x + pixel_offset(pixel, problem.y.shape[:-1], strides[:-1], problem.x.item)
        source = source + wide(channel) * strides[-1] + row * problem.x.strides[axis]
        store_stored(self.y, load_stored(problem.x, source, 1), self.at(-1, operands, pixel, channel))


def _clamped(index: Value, extent: int) -> Value:
    """Return the index as i64, wrapped if negative and clamped to extent - 1."""
    f = index.f
    index = index if index.type == I64 else f.cast("sext", index, I64, "index")
    index = f.select(index.compare("slt", 0), index + extent, index, "index")
    return index.at_most(extent - 1)


@solves(HaloFill)
class HaloByThreads(GpuKernel[HaloFill]):
    """Kernel with one thread per byte; halos are small."""

    @property
    def sizes(self) -> list[int]:
        return [math.prod(view.shape) for view in self.problem.runs]

    def grid(self, tactic: Tactic) -> Grid:
        return Grid(sum(self.sizes), THREADS, THREADS)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        f, operands, rows = begin_kernel(module, name, THREADS, len(self.problem.runs))
        thread = special_register(f, "ctaid.x") * THREADS + special_register(f, "tid.x")
        with f.when(thread.below(rows)):
            item, byte = thread.divided(sum(self.sizes)), thread.remainder(sum(self.sizes))
            first = 0
            for view, size, address in zip(self.problem.runs, self.sizes, operands, strict=True):
                position = byte - first     # unsigned: wraps to a large number for bytes of earlier runs
                with f.when(position.below(size)):
                    at = pixel_offset(position, view.shape, view.strides, 0) + wide(item) * view.item
                    f.store(f.constant(self.problem.value, I8), address + at)
                first += size
