"""Kernel of a Product (problems/matmul.py) of two tensors that are both computed at run time.

    for matrix of the batch:
      for panel of columns:                     b is packed once for all rows; with few rows it is read in place
        for tile of rows:                       a call of the micro-kernel: all of K in registers, program, store

The columns of the grid are panels, so that no panel is packed twice.

In INT8 b is packed as b' = b - MIDDLE. The terms that the zero points add are computed before the product, from the
sums of a's rows and of b's columns.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import item_addresses, offset, unravel
from infer_server.engines.backends.llvm.kernels.common.cost import CYCLES_PER_BYTE_BEYOND
from infer_server.engines.backends.llvm.kernels.common.pixels import (
    finish_pixel,
    load_constants,
    pack_panels,
    panels_between,
)
from infer_server.engines.backends.llvm.kernels.contraction.direct import usual_tile_shapes
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic, begin_kernel, solves
from infer_server.engines.backends.llvm.kernels.matmul.operands import (
    Left,
    Matrix,
    Right,
    integer,
    product_arithmetic,
    store_tile,
)
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I32, PTR
from infer_server.engines.lowering.problems.matmul import MIDDLE, Product
from infer_server.engines.lowering.problems.problem import Array

FEW_ROWS = 8            # rows of a up to which reading b in place may be faster than packing it
MOST_ROWS = 4           # rows of a up to which a product is memory-bound on b; with more, register tiles pay
CACHED = 1 << 18        # bytes of b that fit L2 together with other data
NARROW = 192            # columns of two register tiles
COPIED_TILES = 4        # tiles of rows of a that are copied at a time, if a is not read in place


@dataclass(frozen=True)
class Tile(Tactic):
    """Tactic of a product: rows x (vectors of columns) of y are a micro-kernel."""
    rows: int
    vectors: int
    packed: bool = True     # whether b is packed before the product

    def __str__(self) -> str:
        return f"tile {self.rows}x{self.vectors}" + " unpacked" * (not self.packed)


def few_by_large(problem: Product, isa: Isa) -> bool:
    """Return True for products of few rows that are memory-bound on b, if b's rows are read from end to end."""
    rows, columns = problem.y.shape[-2:]
    arithmetic = product_arithmetic(problem.precision, isa)
    factors = Left(Matrix.of(problem.a), arithmetic, isa), Right(Matrix.of(problem.b), arithmetic, isa, 1)
    return problem.precision == "fp32" and rows <= MOST_ROWS and all(factor.direct for factor in factors) \
        and columns > NARROW and 4 * problem.depth * columns > CACHED


def reading_once(problem: Product) -> float:
    """Return the cycles to read b once from memory."""
    return 4 * problem.depth * problem.y.shape[-1] * math.prod(problem.lead) * CYCLES_PER_BYTE_BEYOND


def vector_cycles(macs: int, precision: str, isa: Isa) -> float:
    """Return the cycles of so many multiply-accumulates by vectors, of which a CPU multiplies two a cycle."""
    return macs / (2 * isa.lanes * product_arithmetic(precision, isa).elements)


@solves(Product)
class ProductKernel(Kernel[Product]):
    """Register-tiled product. A row of the grid is a matrix, a column a panel.

    The packed constants are the zero points and the program's constants, [panel][constant][vector][lane].
    """

    def tactics(self, isa: Isa) -> Sequence[Tile]:
        rows, columns = self.problem.y.shape[-2:]
        widest = isa.vectors_for(columns)
        shapes = usual_tile_shapes(isa, self.problem.precision)
        packed = list(dict.fromkeys(Tile(min(m, rows), min(vectors, widest)) for m, vectors in shapes))
        right = Right(Matrix.of(self.problem.b), product_arithmetic(self.problem.precision, isa), isa, widest)
        if rows > FEW_ROWS or not right.direct:
            return packed
        # With fewer rows tiles are wider, so that b is read in longer pieces.
        wide = Tile(rows, min(max((isa.registers - 4) // rows, 1), widest))
        return (*(replace(tile, packed=False) for tile in dict.fromkeys((wide, *packed))), *packed)

    def cost(self, isa: Isa, tactic: Tile) -> float:
        """Return the cycles of reading b for a few rows by a large matrix, else those of the products.

        The latter are equal for all tactics, so the first one wins. For a few rows tiles read short pieces of each row
        of b, at a fraction of the bandwidth.
        """
        if not few_by_large(self.problem, isa):
            return vector_cycles(self.problem.macs, self.problem.precision, isa)
        return reading_once(self.problem) * (4 if tactic.packed else 2)

    def packing(self, tactic: Tile) -> int:
        return tactic.vectors

    def grid(self, isa: Isa, tactic: Tile) -> Grid:
        return Grid(math.prod(self.problem.lead), 1, -(-self.problem.y.shape[-1] // (tactic.vectors * isa.lanes)))

    def pack(self, isa: Isa, tactic: Tile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return (np.asarray(constants["numbers"], np.float32),
                pack_panels(isa, constants, self.problem.y.shape[-1], packed=False, width=tactic.vectors * isa.lanes))

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        ProductEmitter(self.problem, module, name, isa, tactic).emit()


class ProductEmitter:
    """Emitter of one kernel: the outer loops, and the micro-kernels that they call."""

    def __init__(self, problem: Product, module: Module, name: str, isa: Isa, tile: Tile) -> None:
        self.problem, self.module, self.name, self.isa, self.tile = problem, module, name, isa, tile
        arithmetic = product_arithmetic(problem.precision, isa)
        self.left = Left(Matrix.of(problem.a), arithmetic, isa)
        self.right = Right(Matrix.of(problem.b), arithmetic, isa, tile.vectors, tile.packed)
        self.exact = self.left.exact
        self.rows, self.columns = problem.y.shape[-2:]

    # ---- outer loops
    def emit(self) -> None:
        problem = self.problem
        f, tensors, (begin, end, first, last) = self._begin()
        self.enter(f)
        zeros = [factor.zero(self.numbers, i) for i, factor in enumerate((self.left, self.right))]
        views = (problem.a, problem.b, *problem.operands, problem.y)
        count = math.prod(problem.lead)
        for row in f.range("matrix", begin, end):
            here = item_addresses(tensors, views, row.divided(count))
            indices = unravel(row.remainder(count), problem.lead)
            here = [offset(a, indices, view.strides[:-2]) for a, view in zip(here, views, strict=True)]
            if self.exact:
                self.left.row_sums(here[0], self.sums)
            for start, columns in panels_between(f, first, last, self.columns, self.right.width):
                self.panel(f, here, zeros, start, columns)
        self.leave(f)

    def _begin(self) -> tuple[Function, list[Value], list[Value]]:
        """Return (f, addresses of factors, operands and y, bounds of rows and columns).

        Sets `numbers` and `constants`.
        """
        f, addresses, bounds = begin_kernel(self.module, self.name, len(self.problem.inputs) + 3)
        *tensors, self.numbers, self.constants, y = addresses
        return f, [*tensors, y], bounds

    def enter(self, f: Function) -> None:
        """Allocate scratch for a panel of b, copied rows of a, and the sums of a's rows."""
        copied = 0 if self.left.direct else COPIED_TILES * self.tile.rows * self.left.pitch
        addresses = []
        panel = self.right.panel_bytes * self.tile.packed
        for what, size in (("panel", panel), ("copied", copied), ("sums", 4 * self.rows * self.exact)):
            addresses.append(f.alloca(size, ALIGNMENT, what))
        self.packed, self.copied, self.sums = addresses

    def leave(self, f: Function) -> None:
        """Emit code that runs once after the loops."""

    def panel(self, f: Function, here: list[Value], zeros: list[Value | None], start: Value, columns: int) -> None:
        a, b, *operands, y = here
        w, starts = self.right.matrix.at(b, 0, start), []
        if self.tile.packed:
            self.right.pack_panel(w, columns, self.packed, zeros[1])
            w = self.packed
        if self.exact:
            starts = self.starts(w, columns)
        constants, outs = self.of_panel([*operands, y], start)
        block = self.rows if self.left.direct else COPIED_TILES * self.tile.rows
        for top, height in f.tiles("block", self.rows, block):
            x = self.left.matrix.at(a, top, 0)
            if not self.left.direct:
                self.left.copy(x, height, self.copied, zeros[0])
                x = self.copied
            for row, rows in f.tiles("row", height, self.tile.rows, split_tail=True):
                f.run(self._microkernel(rows, columns), x + row * self.left.pitch, w, self.numbers,
                      self.sums + (top + row) * 4, constants, *self.of_row(outs, top + row), *starts)

    def of_panel(self, addresses: Sequence[Value], start: Value) -> tuple[Value, list[Value]]:
        """Return the addresses of a panel's constants, and of the operands and y from its first column on."""
        views = (*self.problem.operands, self.problem.y)
        return self.constants + start * (4 * self.problem.program.constants), [
            offset(address, [start], view.strides[-1:]) for address, view in zip(addresses, views, strict=True)]

    def of_row(self, addresses: Sequence[Value], row: Value) -> list[Value]:
        """Return the addresses of the operands and y from a row on."""
        return [offset(address, [row], view.strides[-2:-1])
                for address, view in zip(addresses, (*self.problem.operands, self.problem.y), strict=True)]

    def starts(self, panel: Value, columns: int) -> list[Value]:
        """Return the part of the initial sums that depends on the column only: za * (K * (zb - MIDDLE) - total)."""
        f, lanes = panel.f, self.isa.lanes
        za, zb = (integer(f, self.numbers, i) for i in (0, 1))
        depth = (zb - MIDDLE) * self.problem.depth
        return [(f.splat(depth, lanes) - total) * f.splat(za, lanes)
                for total in self.right.column_sums(panel, columns)]

    # ---- the micro-kernel
    def _microkernel(self, rows: int, columns: int) -> str:
        name = f"{self.name}_{rows}x{columns}"
        if name in self.module.functions:
            return name
        problem, isa, lanes = self.problem, self.isa, Lanes(self.isa, columns, packed=False)
        operands = {f"operand{i}": PTR for i in range(len(problem.operands))}
        starts = {f"start{v}": isa.ints for v in range(lanes.vectors)} if self.exact else {}
        f = self.module.function(name, internal=True, x=PTR, w=PTR, numbers=PTR, sums=PTR, constants=PTR, **operands,
                                 y=PTR, **starts)
        parameters = f.parameters
        begin: list[list[Value]] = []
        if self.exact:
            for of_row in self.row_terms(rows, parameters):
                begin.append([parameters[v] - of_row for v in starts])
        sums = self.right.sums(parameters["x"], self.left.pitch, parameters["w"], (rows, columns), begin)
        self.finish(lanes, rows, sums, parameters)
        return name

    def row_terms(self, rows: int, parameters: Mapping[str, Value]) -> Iterator[Value]:
        """Yield the part of the initial sums that depends on the row only, with opposite sign, in all lanes."""
        f = parameters["sums"].f
        zero = integer(f, parameters["numbers"], 1) - MIDDLE
        for m in range(rows):
            yield f.splat(f.load(I32, parameters["sums"] + 4 * m, hint="sum") * zero, self.isa.lanes)

    def finish(self, lanes: Lanes, rows: int, sums: Mapping[tuple[int, int], Value],
                parameters: Mapping[str, Value]) -> None:
        """Run the program on a tile's sums and store the results."""
        problem = self.problem
        constants = load_constants(lanes, parameters["constants"], problem.program.constants)

        def result(m: int) -> list[Value]:
            at = [parameters[f"operand{i}"] + m * view.strides[-2] for i, view in enumerate(problem.operands)]
            totals = [self.right.arithmetic.finish(self.isa, sums[m, v]) for v in range(lanes.vectors)]
            return finish_pixel(lanes, problem.program, totals, problem.operands, at, constants)

        store_tile(lanes, problem.y, rows, result, parameters["y"])
