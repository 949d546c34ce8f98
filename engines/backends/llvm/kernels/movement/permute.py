"""Strided copies: transposes, concat, split, slice, layout changes, with an optional epilogue program.

The strides decide among four methods:

  runs         the innermost axis is contiguous in both: wide copies
  planes       y interleaves 2 to 4 planes of x (an NCHW image becomes NHWC): vectors of each plane, one byte shuffle
  transpose    another axis is contiguous in x: blocks of n x n elements, transposed in registers by log2(n) zips.
      Blocks
               that share cache lines follow each other, because rows at a power of two fall into few sets of a cache
  elements     one by one
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import from_float, to_float
from infer_server.engines.backends.llvm.kernels.common.access import (
    BLOCK,
    ViewRuns,
    copy_bytes,
    item_addresses,
    offset,
    transposed,
    unravel,
)
from infer_server.engines.backends.llvm.kernels.elementwise.pointwise import PointwiseKernel
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import ELEMENTS, FLOAT, I8, I16, I32, I64, lanes_of, vector
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.problems.elementwise import Pointwise
from infer_server.engines.lowering.problems.movement import Permute
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import View, joined

_INTEGERS = {1: I8, 2: I16, 4: I32, 8: I64}
_MOST_PLANES = 4
_LINE = 64              # bytes of a cache line


@solves(Permute)
class PermuteKernel(Kernel[Permute]):
    """Kernel of a strided copy."""
    @cached_property
    def views(self) -> tuple[View, View]:
        problem = self.problem
        x, y = joined((problem.x, problem.y), keep_last=problem.program.constants > 0 and not problem.uniform)
        return x, y

    @property
    def way(self) -> str:
        x, y = self.views
        if x.strides[-1] == x.size and y.strides[-1] == y.size:
            return "runs"
        if self.across is None or y.strides[-1] != y.size:
            return "elements"
        together = self.across == len(y.shape) - 2 and y.strides[-2] == y.shape[-1] * y.size
        return "planes" if together and y.shape[-1] <= _MOST_PLANES else "transpose"

    @property
    def across(self) -> int | None:
        """Return the axis that is contiguous in x, or None."""
        x, _ = self.views
        return next((axis for axis, stride in enumerate(x.strides) if stride == x.size), None)

    @cached_property
    def _pointwise(self) -> PointwiseKernel | None:
        """Return an equal pointwise kernel, if it runs a program on runs or elements.

        It is None for raw copies and for the other methods.
        """
        if self.way in ("planes", "transpose") or self.problem.raw:
            return None
        problem = self.problem
        return PointwiseKernel(Pointwise((problem.x,), problem.y, problem.program, problem.uniform))

    # ---- grid
    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        if self._pointwise:
            return self._pointwise.grid(isa, tactic)
        if self.way in ("planes", "transpose"):
            return Grid(math.prod(self._outer) * self._blocks(isa))
        return Grid(ViewRuns(self.views).rows)

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        if self._pointwise:
            return self._pointwise.windows(isa, tactic)
        if self.way not in ("planes", "transpose"):
            return ViewRuns(self.views).windows()
        assert self.across is not None
        if not self._outer:
            block = self._block(isa)
            return [Window.along(view, self.across, 1, block, count=block) for view in self.views]
        first = 0 if self.across else 1         # outermost axis whose indices are rows of the grid
        rows = math.prod(self._outer[1:]) * self._blocks(isa)
        return [Window.along(view, first, rows) for view in self.views]

    @property
    def _outer(self) -> list[int]:
        """Return the extents of all axes but the innermost one and `across`."""
        return [n for axis, n in enumerate(self.views[0].shape[:-1]) if axis != self.across]

    def _block(self, isa: Isa) -> int:
        """Return the elements along `across` in a row of the grid, a multiple of the step."""
        step = self._step(isa)
        return max(BLOCK // (self.views[0].shape[-1] * step), 1) * step

    def _blocks(self, isa: Isa) -> int:
        assert self.across is not None
        return -(-self.views[0].shape[self.across] // self._block(isa))

    def _tile(self, isa: Isa) -> int:
        """Return the elements of a vector.

        Raw copies use 128 bits, since zips inside them are native on every machine.
        """
        return 16 // self.problem.x.size if self.problem.raw else isa.lanes

    def _step(self, isa: Isa) -> int:
        """Return the elements along `across` per step.

        A transpose takes two cache lines of x, which are fetched together.
        """
        return self._tile(isa) if self.way == "planes" else max(2 * _LINE // self.problem.x.size, self._tile(isa))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        if self._pointwise:
            self._pointwise.emit(module, name, isa, tactic)
            return
        f, (x, constants, y), (begin, end, *_) = begin_kernel(module, name, 3)
        if self.way == "planes":
            self._tiles(f, isa, x, y, begin, end, self._planes(isa, constants))
        elif self.way == "transpose":
            self._tiles(f, isa, x, y, begin, end, self._transpose(isa, constants))
        else:
            width = 4 * isa.bytes if self.way == "runs" else 1
            ViewRuns(self.views).emit(f, [x, y], begin, end, width, partial(self._copy, isa))

    def _copy(self, isa: Isa, at: list[Value], start: Value, count: int) -> None:
        """Copy `count` contiguous elements from `start` on."""
        x, y = (offset(a, [start], [v.strides[-1]]) for a, v in zip(at, self.views, strict=True))
        copy_bytes(isa, x, y, count * self.problem.x.size)

    def _tiles(self, f: Function, isa: Isa, x: Value, y: Value, begin: Value, end: Value,
               body: Callable[[Value, Value, int], None]) -> None:
        """Emit the loops: body(x, y, count) for every `count` neighbours along `across`, over the innermost axis."""
        across, block, step = self.across, self._block(isa), self._step(isa)
        assert across is not None
        extent, rows = self.views[0].shape[across], math.prod(self._outer) * self._blocks(isa)
        for row in f.range("row", begin, end):
            at = item_addresses([x, y], self.views, row.divided(rows))
            *indices, index = unravel(row.remainder(rows), (*self._outer, self._blocks(isa)))
            indices.insert(across, index * block)
            x0, y0 = (offset(a, indices, view.strides[:-1]) for a, view in zip(at, self.views, strict=True))
            x_step, y_step = (view.strides[across] for view in self.views)
            count = (index.like(extent - extent % step) - index * block).at_most(block)
            for i in f.range("tile", count.like(0), count, step):
                body(x0 + i * x_step, y0 + i * y_step, step)
            if isinstance(extent, SymbolicInt) or extent % step:
                with f.when((index + 1).compare("eq", self._blocks(isa))):
                    for start, rest in f.tail(extent, step):
                        i = start - index * block
                        body(x0 + i * x_step, y0 + i * y_step, rest)

    def _load(self, isa: Isa, address: Value, count: int) -> Value:
        """Load `count` contiguous elements into a whole vector: as stored for raw copies, else as float32."""
        f, n = address.f, self._tile(isa)
        element = _INTEGERS[self.problem.x.size] if self.problem.raw else ELEMENTS[self.problem.x.dtype]
        value = f.load(vector(count, element), address, hint="run")
        if count < n:
            value = f.shuffle(value, None, [min(i, count - 1) for i in range(n)], "run")
        return value if self.problem.raw else to_float(isa, self.problem.x.dtype, value)

    def _store(self, isa: Isa, value: Value, address: Value, count: int) -> None:
        """Store the first `count` elements."""
        f = address.f
        value = value if self.problem.raw else from_float(isa, self.problem.y.dtype, value)
        if count < self._tile(isa):
            value = f.shuffle(value, None, range(count), "part")
        f.store(value, address)

    # ---- planes
    def _planes(self, isa: Isa, constants: Value) -> Callable[[Value, Value, int], None]:
        f, depth, n = constants.f, self.views[1].shape[-1], self._tile(isa)
        numbers = [[f.splat(f.load(FLOAT, constants + 4 * (c * self._pitch(isa) + plane)), isa.lanes)
                    for c in range(self.problem.program.constants)] for plane in range(depth)]

        def tile(x: Value, y: Value, count: int) -> None:
            planes = [self._load(isa, x + plane * self.views[0].strides[-1], count) for plane in range(depth)]
            if not self.problem.raw:
                program = self.problem.program
                planes = [program.run(isa, None, [value], c) for value, c in zip(planes, numbers, strict=True)]
                if self.problem.y.dtype == "uint8":
                    self._store_bytes(isa, planes, y, count)
                    return
            for i, value in enumerate(_interleave(planes)):
                if count * depth > i * n:
                    self._store(isa, value, y + i * n * self.problem.y.size, min(count * depth - i * n, n))
        return tile

    @staticmethod
    def _store_bytes(isa: Isa, planes: list[Value], y: Value, count: int) -> None:
        """Store planes as interleaved bytes.

        The packs leave four pixels of each plane in each 128-bit part: shuffle inside the parts, then close the gaps.
        """
        f, depth = y.f, len(planes)
        ints = [isa.round(isa.min(plane, 255)) for plane in planes]
        packed = isa.pack_u8([*ints, *[ints[0].like(0)] * (4 - depth)])
        inside = [i % depth * 4 + i // depth for i in range(4 * depth)] + [15] * (16 - 4 * depth)
        parts = range(0, isa.bytes, 16)
        packed = f.shuffle(packed, None, [part + i for part in parts for i in inside], "pixels")
        closed = [part + i for part in parts for i in range(4 * depth)]
        f.store(f.shuffle(packed, None, closed[:count * depth], "run"), y)

    # ---- transpose
    def _transpose(self, isa: Isa, constants: Value) -> Callable[[Value, Value, int], None]:
        (x_view, y_view), across, n, f = self.views, self.across, self._tile(isa), constants.f
        step = 0 if self.problem.uniform else 4     # bytes between the constants of neighbours on the innermost axis
        assert across is not None

        def tile(x: Value, y: Value, first: Value, size: int, count: int) -> None:
            rows = [self._load(isa, x + min(i, size - 1) * x_view.strides[-1], count) for i in range(n)]
            numbers = [f.load(isa.floats, constants + c * self._pitch(isa) * 4 + first * step)
                       for c in range(self.problem.program.constants)]
            for i, value in enumerate(transposed(rows)[:count]):
                if not self.problem.raw:
                    value = self.problem.program.run(isa, None, [value], numbers)
                self._store(isa, value, y + i * y_view.strides[across], size)

        def tiles(x: Value, y: Value, count: int) -> None:
            """Transpose all of the innermost axis in steps of a cache line of y."""
            line = max(_LINE // y_view.size, n)
            for start, some in f.tiles("innermost", y_view.shape[-1], line):
                for column, width in f.tiles("column", count, n):
                    for row, size in f.tiles("line", some, n):
                        first = start + row
                        tile(x + (first * x_view.strides[-1] + column * x_view.size),
                             y + (first * y_view.size + column * y_view.strides[across]), first, size, width)
        return tiles

    def _pitch(self, isa: Isa) -> int:
        """Return the floats from one constant to the next."""
        return -(-self.views[1].shape[-1] // isa.lanes) * isa.lanes

    # ---- constants
    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Pack "program", float32 arrays [1] or [channels], as [constant][channel], padded to whole vectors."""
        given = constants.get("program", ())
        if self._pointwise:
            return self._pointwise.pack(isa, tactic, {"program": given})
        table = np.zeros((len(given), self._pitch(isa)), np.float32)
        for row, constant in zip(table, given, strict=True):
            row[:None if self.problem.uniform else self.problem.y.shape[-1]] = constant
        return (table.ravel(),)


def _interleave(planes: list[Value]) -> list[Value]:
    """Interleave k vectors of n: k vectors with element 0 of each, then element 1 of each, ..."""
    n, depth, result = lanes_of(planes[0].type), len(planes), []
    for first in range(0, n * depth, n):
        value = planes[0]
        for k, plane in enumerate(planes[1:], 1):       # invariant: planes below k are in place
            def pick(i: int, k: int = k, first: int = first) -> int:
                element, of = divmod(first + i, depth)
                if of == k:
                    return n + element
                return element if k == 1 and of == 0 else i if of < k else 0
            value = value.f.shuffle(value, plane, [pick(i) for i in range(n)], "pixels")
        result.append(value)
    return result
