"""Gathers: elements picked by index, as copies of contiguous runs or one element at a time."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import copy_bytes, each_row, offset, unravel
from infer_server.engines.backends.llvm.kernels.elementwise.integers import load_integers
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import ELEMENTS, I64
from infer_server.engines.lowering.problems.movement import GatherElements, Lookup, Take
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import View, joined

CHUNK = 16          # vectors of an unrolled copy
TOGETHER = 8        # elements that are gathered per iteration


@solves(Take)
class TakeKernel(Kernel[Take]):
    """Gather with constant indices along one axis: copies of runs."""
    @property
    def run(self) -> int:
        """Return the contiguous bytes that one index selects."""
        x = self.problem.x
        return x.size * math.prod(x.shape[self.problem.axis + 1:])

    @cached_property
    def outer(self) -> tuple[View, View]:
        """Return x and y without the axes that are indexed and copied."""
        problem, axis = self.problem, self.problem.axis
        x, y = joined([View(v.dtype, (*v.shape[:axis], 1), (*v.strides[:axis], 0), v.item)
                       for v in (problem.x, problem.y)], keep_last=True)
        return x, y

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.outer[0].shape))

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        if not self.problem.axis:
            return super().windows(isa, tactic)
        rows = math.prod(self.problem.x.shape[1:self.problem.axis])
        return [Window.along(view, rows=rows) for view in (self.problem.x, self.problem.y)]

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, (source, offsets, target), (begin, end, *_) = begin_kernel(module, name, 3)
        extent, step = self.problem.y.shape[self.problem.axis], self.problem.y.strides[self.problem.axis]
        for x, y in each_row(f, begin, end, [source, target], self.outer, self.outer[0].shape[:-1]):
            for i in f.loop("index", extent):
                _copy_run(f, isa, x + f.load(I64, offsets + i * 8), y + i * step, self.run)

    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Convert "index" to byte offsets in x: one index of x's axis for each of y's.

        Negative ones count from the end.
        """
        index = np.asarray(constants["index"], np.int64) % self.problem.x.shape[self.problem.axis]
        return (index * self.problem.x.strides[self.problem.axis],)


@solves(Lookup)
class LookupKernel(Kernel[Lookup]):
    """Gather of rows of a constant table, as of an embedding, by run-time indices."""
    @property
    def run(self) -> int:
        """Return the bytes of a row of the table."""
        return self.problem.y.size * self.problem.y.shape[-1]

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.index.shape))

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        rows = math.prod(self.problem.index.shape[1:])
        return [Window.along(view, rows=rows) if self.problem.index.shape else Window.whole(view)
                for view in (self.problem.index, self.problem.y)]

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, (index, table, y), (begin, end, *_) = begin_kernel(module, name, 3)
        problem, shape = self.problem, self.problem.index.shape
        for row in f.range("row", begin, end):
            indices = unravel(row.remainder(math.prod(shape)), shape)
            item = row.divided(math.prod(shape))
            source = offset(index + item * problem.index.item, indices, problem.index.strides)
            stored = f.load(ELEMENTS[problem.index.dtype], source, hint="stored")
            wide = stored if stored.type == I64 else f.cast("sext", stored, I64, "index")
            wide = f.select(wide.compare("slt", 0), wide + problem.rows, wide)
            target = offset(y + item * problem.y.item, indices, problem.y.strides[:-1])
            _copy_run(f, isa, table + wide.at_most(problem.rows - 1) * self.run, target, self.run)

    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return "table", [rows, width], as it is stored."""
        return (np.ascontiguousarray(constants["table"]),)


@solves(GatherElements)
class GatherElementsKernel(Kernel[GatherElements]):
    """GatherElements: an index for each element of y."""
    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.y.shape[:-1]))

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        f, addresses, (begin, end, *_) = begin_kernel(module, name, 3)
        steps = [self._steps(), problem.index.strides, problem.y.strides]
        views = (replace(problem.x, strides=steps[0]), problem.index, problem.y)
        for at in each_row(f, begin, end, addresses, views, problem.y.shape[:-1]):
            for start, count in f.tiles("element", problem.y.shape[-1], TOGETHER):
                self._elements(isa, [offset(a, [start], s[-1:]) for a, s in zip(at, steps, strict=True)], count)

    def _steps(self) -> tuple[int, ...]:
        """Return x's strides, with 0 along the axis that the index replaces."""
        return tuple(0 if axis == self.problem.axis else stride for axis, stride in enumerate(self.problem.x.strides))

    def _elements(self, isa: Isa, at: list[Value], count: int) -> None:
        """Gather `count` contiguous elements; at: addresses in x, the index and y."""
        problem, (x, index, y) = self.problem, at
        f, extent = x.f, problem.x.shape[problem.axis]
        chosen = load_integers(isa, problem.index, index, count)
        chosen = f.select(chosen.compare("slt", 0), chosen + extent, chosen)
        chosen = f.select(chosen.below(extent), chosen, chosen.like(extent - 1))
        element = ELEMENTS[problem.x.dtype]
        for i in range(count):
            one = f.op(I64, f"extractelement {chosen}, i32 {i}", "index")
            source = x + one * problem.x.strides[problem.axis] + i * self._steps()[-1]
            f.store(f.load(element, source, hint="element"), y + i * problem.y.strides[-1])


def _copy_run(f: Function, isa: Isa, source: Value, target: Value, count: int) -> None:
    for start, size in f.tiles("run", count, CHUNK * isa.bytes):
        copy_bytes(isa, source + start, target + start, size)
