"""Product of two run-time tensors on a matrix unit.

    for matrix of the batch:
      for panel of columns:                     b is packed once for all rows
        for tile of rows:                       tiles -> int32 or float32 sums, in scratch -> program -> y

In INT8 the sums begin with the terms of the zero points that depend on the column; those of the row are subtracted
when sums are read from scratch.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.codegen.tiles import AMX, Tiles
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, solves
from infer_server.engines.backends.llvm.kernels.matmul.integers import IntegerProductEmitter, IntegerProductKernel
from infer_server.engines.backends.llvm.kernels.matmul.operands import Matrix, product_arithmetic
from infer_server.engines.backends.llvm.kernels.matmul.product import ProductEmitter, ProductKernel, Tile
from infer_server.engines.backends.llvm.kernels.matrix_unit.factors import (
    LINE,
    ROWS,
    StoredSums,
    TileLeft,
    TileProduct,
    TileRight,
    instruction,
    pieces,
    row_tiles,
    tile_cycles,
)
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import PTR
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.problems.matmul import IntegerProduct, Product
from infer_server.engines.lowering.problems.view import SIZES

LEAST_ROWS = 5          # fewer rows leave most of a register empty
SHAPES = ((32, 2), (16, 4), (16, 2), (32, 1), (16, 1))      # rows x vectors: at most four accumulators
ACCUMULATORS = 4


@dataclass(frozen=True)
class AmxProductTile(Tile):
    """Tactic of a product on a matrix unit."""

    def __str__(self) -> str:
        return f"{super().__str__()} amx"


class _OnMatrixUnit(ProductKernel):
    """Tactics and cost of products on a matrix unit; grid and constants are those of ProductKernel."""

    def applies(self, isa: Isa) -> bool:
        return bool(instruction(self.problem.precision, isa))

    def tactics(self, isa: Isa) -> Sequence[AmxProductTile]:
        rows, columns = self.problem.y.shape[-2:]
        if not self.applies(isa) or rows < LEAST_ROWS:
            return ()
        widest, tallest = isa.vectors_for(columns), -(-rows // ROWS) * ROWS
        return tuple(dict.fromkeys(AmxProductTile(min(m, tallest), min(n, widest)) for m, n in SHAPES))

    def cost(self, isa: Isa, tactic: Tile) -> float:
        problem = self.problem
        arithmetic, (rows, columns) = product_arithmetic(problem.precision, isa), problem.y.shape[-2:]
        return math.prod(problem.lead) * tile_cycles(rows, problem.depth * SIZES[arithmetic.dtype], columns)


@solves(Product)
class MatrixUnitProduct(_OnMatrixUnit):
    """Product of floats, or of bytes with constant zero points."""

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        _TileProductEmitter(self.problem, module, name, isa, tactic).emit()


@solves(IntegerProduct)
class MatrixUnitIntegerProduct(_OnMatrixUnit, IntegerProductKernel):
    """Product of bytes with zero points in memory."""
    problem: IntegerProduct

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        _TileIntegerProductEmitter(self.problem, module, name, isa, tactic).emit()


class _TileProductEmitter(ProductEmitter):
    """Emitter of one kernel: the micro-kernels of the sums and of the epilogue are separate functions."""

    def __init__(self, problem: Product, module: Module, name: str, isa: Isa, tile: Tile) -> None:
        super().__init__(problem, module, name, isa, tile)
        arithmetic = product_arithmetic(problem.precision, isa)
        self.rows_of_a = TileLeft(Matrix.of(problem.a), arithmetic, isa)
        self.panels = TileRight(Matrix.of(problem.b), arithmetic, isa, tile.vectors)
        self.right = self.panels
        tall = tile.rows // ROWS
        rows, columns = range(ACCUMULATORS, ACCUMULATORS + tall), range(ACCUMULATORS + tall, AMX.registers)
        self.product = TileProduct(self.panels, instruction(problem.precision, isa), rows, columns)
        self.sums_pitch = tile.vectors * LINE

    def enter(self, f: Function) -> None:
        """Allocate scratch for a panel of b, copied rows of a, sums and what they begin with."""
        sizes = {"panel": self.panels.panel_bytes, "copied": self.rows_of_a.copied_bytes(self.tile.rows),
                 "sums": 4 * self.rows * self.exact, "start": self.sums_pitch * self.exact,
                 "tile": self.tile.rows * self.sums_pitch}
        self.packed, self.copied, self.sums, self.start, self.stored = (
            f.alloca(size, ALIGNMENT, what) for what, size in sizes.items())
        Tiles(f).configure(self.product.shapes(ACCUMULATORS))

    def leave(self, f: Function) -> None:
        Tiles(f).release()

    def panel(self, f: Function, here: list[Value], zeros: list[Value | None], start: Value, columns: int) -> None:
        a, b, *others = here
        self.panels.pack_panel(self.panels.matrix.at(b, 0, start), columns, self.packed, zeros[1])
        if self.exact:
            for v, value in enumerate(self.starts(self.packed, columns)):
                f.store(value, self.start + v * LINE, LINE)
        constants, outs = self.of_panel(others, start)
        left, step = self.rows_of_a, self.tile.rows
        for row, rows in row_tiles(f, "row", self.rows, step):
            x, pitch = left.matrix.at(a, row, 0), left.matrix.strides[0]
            whole = not isinstance(rows, SymbolicInt) and rows == step
            if not (left.direct and whole):
                left.copy(x, rows, self.copied, zeros[0])
                x, pitch = self.copied, left.copied_pitch
            height = -(-rows // ROWS) if not isinstance(rows, SymbolicInt) else step // ROWS
            f.run(self._sums(height, columns, "copied" if x is self.copied else "direct", pitch),
                  x, self.packed, self.start, self.stored)
            for piece, size in pieces(f, rows, step):
                first = row + piece
                f.run(self._epilogue(size, columns), self.stored + piece * self.sums_pitch, self.numbers,
                      self.sums + first * 4, constants, *self.of_row(outs, first))

    def _sums(self, height: int, columns: int, source: str, pitch: int) -> str:
        """Return the name of the function that computes the sums of `height` registers of rows by a panel."""
        name = f"{self.name}_{source}_{height}x{columns}"
        if name not in self.module.functions:
            f = self.module.function(name, internal=True, a=PTR, w=PTR, start=PTR, tile=PTR)
            a, w, start, tile = f.parameters.values()
            self.product.emit(a, pitch, w, (height, columns), start if self.exact else None, (tile, self.sums_pitch))
        return name

    def _epilogue(self, rows: int, columns: int) -> str:
        """Return the name of the function that computes y from the sums of rows."""
        name = f"{self.name}_epilogue_{rows}x{columns}"
        if name in self.module.functions:
            return name
        operands = {f"operand{i}": PTR for i in range(len(self.problem.operands))}
        f = self.module.function(name, internal=True, tile=PTR, numbers=PTR, sums=PTR, constants=PTR, **operands, y=PTR)
        terms = list(self.row_terms(rows, f.parameters)) if self.exact else []
        sums = StoredSums(self.isa, f.parameters["tile"], self.sums_pitch, (rows, columns), self.exact,
                          lambda m, value: value - terms[m] if terms else value)
        self.finish(Lanes(self.isa, columns, packed=False), rows, sums, f.parameters)
        return name


class _TileIntegerProductEmitter(_TileProductEmitter, IntegerProductEmitter):
    """Emitter for zero points in memory."""
    problem: IntegerProduct
