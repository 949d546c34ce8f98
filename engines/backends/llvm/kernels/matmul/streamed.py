"""Product of a few rows by a matrix that no cache holds: the matrix is read once, row by row.

    for matrix of the batch:
      for panel of columns:
        for some rows k of b:                   several at a time, as streams that the hardware prefetcher follows
          for vector of columns:                the panel's sums are in scratch: load, add, store
        for vector of columns: program, store

A register tile is narrow: it reads short pieces of each row of b, for which memory delivers half the bandwidth.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import item_addresses, offset, unravel
from infer_server.engines.backends.llvm.kernels.common.pixels import (
    finish_pixel,
    load_constants,
    pack_panels,
    panels_between,
)
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic, begin_kernel, solves
from infer_server.engines.backends.llvm.kernels.matmul.product import few_by_large, reading_once
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import FLOAT
from infer_server.engines.lowering.problems.matmul import Product
from infer_server.engines.lowering.problems.problem import Array

PIECE = 4               # vectors that the program runs on at a time
WIDTHS = 512, 128       # panel widths in vectors, multiples of PIECE


@dataclass(frozen=True)
class Streams(Tactic):
    """Tactic of the streamed kernel: rows of b that are read at the same time, vectors of columns in a panel."""
    streams: int
    vectors: int

    def __str__(self) -> str:
        return f"{self.streams} streams of {self.vectors} vectors"


@solves(Product)
class StreamedKernel(Kernel[Product]):
    """Product that reads b once. A row of the grid is a matrix, a column a panel.

    The packed constants are those of the program.
    """

    def applies(self, isa: Isa) -> bool:
        return few_by_large(self.problem, isa)

    def tactics(self, isa: Isa) -> Sequence[Streams]:
        if not self.applies(isa):
            return ()
        rows, columns = self.problem.y.shape[-2:]
        widths = dict.fromkeys(min(width, -(-columns // isa.lanes)) for width in WIDTHS)
        return tuple(Streams(4 if rows <= 2 else 2, width) for width in widths)

    def cost(self, isa: Isa, tactic: Streams) -> float:
        return reading_once(self.problem)

    def packing(self, tactic: Streams) -> None:
        """Return None: constants are packed in pieces that do not depend on the panels."""
        return

    def grid(self, isa: Isa, tactic: Streams) -> Grid:
        columns = self.problem.y.shape[-1]
        return Grid(math.prod(self.problem.lead), 1, -(-columns // (tactic.vectors * isa.lanes)))

    def pack(self, isa: Isa, tactic: Streams, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return (pack_panels(isa, constants, self.problem.y.shape[-1], packed=False, width=PIECE * isa.lanes),)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Streams) -> None:
        _StreamedEmitter(self.problem, module, name, isa, tactic).emit()


class _StreamedEmitter:
    def __init__(self, problem: Product, module: Module, name: str, isa: Isa, tactic: Streams) -> None:
        self.problem, self.module, self.name, self.isa, self.tactic = problem, module, name, isa, tactic
        self.rows, self.columns = problem.y.shape[-2:]
        self.pitch = -(-tactic.vectors // PIECE) * PIECE * isa.bytes        # bytes from one row of sums to the next

    def emit(self) -> None:
        problem, width = self.problem, self.tactic.vectors * self.isa.lanes
        f, addresses, (begin, end, first, last) = begin_kernel(self.module, self.name, len(problem.inputs) + 2)
        *tensors, constants, y = addresses
        sums = f.alloca(self.rows * self.pitch, ALIGNMENT, "sums")
        views, count = (*problem.inputs, problem.y), math.prod(problem.lead)
        for row in f.range("matrix", begin, end):
            indices = unravel(row.remainder(count), problem.lead)
            here = item_addresses([*tensors, y], views, row.divided(count))
            a, b, *others = [offset(at, indices, view.strides[:-2]) for at, view in zip(here, views, strict=True)]
            for start, columns in panels_between(f, first, last, self.columns, width):
                self._add_rows(f, a, b + start * 4, sums, columns)
                moved = [offset(at, [start], view.strides[-1:])
                         for at, view in zip(others, (*problem.operands, problem.y), strict=True)]
                self._finish(f, sums, constants + start * (4 * problem.program.constants), moved, columns)

    def _add_rows(self, f: Function, a: Value, b: Value, sums: Value, columns: int) -> None:
        vectors = -(-columns // self.isa.lanes)
        for m in range(self.rows):
            for v in f.loop("zero", vectors):
                f.store(f.constant(0, self.isa.floats), sums + m * self.pitch + v * self.isa.bytes, self.isa.bytes)
        for k, streams in f.tiles("k", self.problem.depth, self.tactic.streams, split_tail=True):
            factors = [[f.splat(f.load(FLOAT, a + k * 4 + (m * self.problem.a.strides[-2] + 4 * s), hint="a"),
                                self.isa.lanes) for s in range(streams)] for m in range(self.rows)]
            row = b + k * self.problem.b.strides[-2]
            for v in f.loop("vector", vectors):
                # Loads may pass the last column, into other elements or the slack of b; those sums are not used.
                parts = [f.load(self.isa.floats, row + s * self.problem.b.strides[-2] + v * self.isa.bytes, hint="b")
                         for s in range(streams)]
                for m in range(self.rows):
                    address = sums + m * self.pitch + v * self.isa.bytes
                    total = f.load(self.isa.floats, address, self.isa.bytes, "sum")
                    for factor, part in zip(factors[m], parts, strict=True):
                        total = self.isa.fma(factor, part, total)
                    f.store(total, address, self.isa.bytes)

    def _finish(self, f: Function, sums: Value, constants: Value, others: list[Value], columns: int) -> None:
        problem = self.problem
        views = (*problem.operands, problem.y)
        for start, count in f.tiles("piece", columns, PIECE * self.isa.lanes):
            lanes = Lanes(self.isa, count, packed=False)
            numbers = load_constants(lanes, constants + start * (4 * problem.program.constants),
                                     problem.program.constants)
            for m in range(self.rows):
                *operands, out = [offset(at, [start], view.strides[-1:]) + m * view.strides[-2]
                                  for at, view in zip(others, views, strict=True)]
                at = sums + m * self.pitch + start * 4
                totals = [f.load(self.isa.floats, at + v * self.isa.bytes, self.isa.bytes, "sum")
                          for v in range(lanes.vectors)]
                lanes.store(problem.y.dtype, [finish_pixel(lanes, problem.program, totals, problem.operands, operands,
                                                           numbers)], [out])
