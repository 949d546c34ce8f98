"""Factors of a product of two run-time tensors on a matrix unit, and the sums of a tile.

    a [M, K]    read in place: 16 rows and a block of up to 64 bytes of K are a register
    b [K, N]    packed into panels as for vectors (matmul/operands.py): one step of K is a row of a register
    c           16 rows x 16 columns are a register, which is stored to scratch memory

All blocks of K have one size, and panels have zeros past K. Zero times infinity is NaN, so rows of floats are read in
place only if blocks divide K; else they are copied and padded with zeros. Registers always have 16 rows: rows of `a`
past M are what the scratch memory holds, and their sums are not used.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.tiles import AMX, Shapes, Tiles
from infer_server.engines.backends.llvm.kernels.matmul.operands import Left, Right, converted, product_arithmetic
from infer_server.engines.backends.llvm.kernels.rows.passes import live
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import I64
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.problems.view import SIZES

ROWS = AMX.rows                     # rows of a register; those of the right operand are steps of K
STEPS = AMX.row_bytes // AMX.group
LINE = AMX.row_bytes
OVERRUN = 3             # bytes that a block of integers may read past a row


@dataclass(frozen=True)
class Blocks:
    """Division of the steps of K into blocks of one size; those of a symbolic K fill registers."""
    steps: int

    @property
    def count(self) -> int:
        return -(-self.steps // STEPS)

    @property
    def size(self) -> int:
        """Return the steps of a block."""
        return STEPS if isinstance(self.steps, SymbolicInt) else -(-self.steps // self.count)

    @property
    def padded(self) -> int:
        """Return the steps of all blocks."""
        return self.count * self.size


@dataclass(frozen=True)
class TileRight(Right):
    """Right factor, packed into panels of whole blocks of K."""

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.steps)

    @property
    def panel_bytes(self) -> int:
        return self.blocks.padded * self.vectors * LINE

    def pack_panel(self, source: Value, columns: int, target: Value, zero: Value | None,
                   last: Value | None = None) -> None:
        super().pack_panel(source, columns, target, zero, last)
        f, width = source.f, self.isa.vectors_for(columns) * LINE
        missing = self.blocks.padded - self.steps
        if isinstance(missing, SymbolicInt) or missing:
            end = target + self.steps * width
            for at in f.range("padding", f.constant(0, I64), f.constant(missing * width, I64), LINE):
                f.store(f.constant(0, self.isa.ints), end + at, LINE)


@dataclass(frozen=True)
class TileLeft(Left):
    """Left factor, whose registers are loaded from memory a row pitch apart."""

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.steps)

    @property
    def direct(self) -> bool:
        matrix = self.matrix
        if matrix.dtype != self.arithmetic.dtype or isinstance(matrix.columns, SymbolicInt):
            return False
        overrun = self.blocks.padded * self.arithmetic.step_bytes - matrix.columns * matrix.size
        return matrix.strides[1] == matrix.size and overrun <= (OVERRUN if self.exact else 0)

    @property
    def copied_pitch(self) -> int:
        """Return the bytes between two rows of a copy."""
        return self.blocks.padded * self.arithmetic.step_bytes

    def copied_bytes(self, rows: int) -> int:
        """Return the bytes of scratch memory that a copy of `rows` rows needs."""
        return rows * self.copied_pitch + LINE

    def copy(self, source: Value, rows: int, target: Value, zero: Value | None) -> None:
        """Copy `rows` rows from `source` on in the dtype of the arithmetic, with zeros past K."""
        f, isa, dtype, lanes = source.f, self.isa, self.arithmetic.dtype, self.isa.lanes
        nothing = f.constant(0, I64)
        columns = self.matrix.columns
        for at in f.range("cleared", nothing, f.constant(rows * self.copied_pitch, I64), LINE):
            f.store(f.constant(0, isa.ints), target + at)
        for row in f.range("copied row", nothing, f.constant(rows, I64)):
            for column, count in self._parts(f):
                here = self.matrix.at(source, row, column)
                stored = converted(isa, self.matrix.dtype, dtype, here, count, zero)
                if isinstance(columns, SymbolicInt):
                    stored = live(isa, stored, f.constant(columns, I64) - column, 0)
                elif count < lanes:
                    stored = f.shuffle(stored, None, range(count), "part")
                f.store(stored, target + row * self.copied_pitch + column * SIZES[dtype])

    def _parts(self, f: Function) -> Iterator[tuple[Value, int]]:
        """Yield (column, count) of the vectors of a row; the last vector of a symbolic row is read whole."""
        columns, lanes = self.matrix.columns, self.isa.lanes
        if not isinstance(columns, SymbolicInt):
            yield from f.tiles("copied part", columns, lanes)
            return
        for column in f.range("copied part", f.constant(0, I64), f.constant(columns, I64), lanes):
            yield column, lanes


@dataclass(frozen=True)
class TileProduct:
    """Emitter of the product of rows by a packed panel.

    a, b: registers for operands, which are used in turn; accumulators are the registers before them.
    """
    right: TileRight
    instruction: str
    a: Sequence[int]
    b: Sequence[int]

    @property
    def depth(self) -> int:
        """Return the bytes of a row in a block of K."""
        return self.right.blocks.size * AMX.group

    def shapes(self, accumulators: int) -> Shapes:
        shapes = {register: (ROWS, LINE) for register in range(accumulators)}
        shapes |= dict.fromkeys(self.a, (ROWS, self.depth)) | dict.fromkeys(self.b, (self.right.blocks.size, LINE))
        return shapes

    def emit(self, x: Value, pitch: int | Value, panel: Value, shape: tuple[int, int], start: Value | None,
             sums: tuple[Value, int]) -> None:
        """Emit the sums of a tile.

        Parameters
        ----------
        x : address of the first row; others are `pitch` bytes apart.
        panel : address of the packed panel.
        shape : registers of rows, and columns of the panel.
        start : address of the int32 that each column's sums begin with; None: they begin with zero.
        sums : address and row pitch in bytes of the memory for the sums.
        """
        f, isa, (height, columns) = x.f, self.right.isa, map(index, shape)
        tiles, vectors, width = Tiles(f), -(-columns // isa.lanes), isa.vectors_for(columns) * LINE
        accumulators = [(t, v, t * vectors + v) for t in range(height) for v in range(vectors)]
        for _, v, register in accumulators:
            if start is None:
                tiles.zero(register)
            else:
                tiles.load(register, start + v * LINE, 0)
        at = {"x": x, "w": panel}
        for _ in f.loop("k", self.right.blocks.count, at=at):
            for v in range(vectors):
                b = self.b[v % len(self.b)]
                tiles.load(b, at["w"] + v * LINE, width)
                for t in range(height):
                    a = self.a[t % len(self.a)]
                    if v == 0 or len(self.a) < height:
                        tiles.load(a, at["x"] + pitch * (t * ROWS), pitch)
                    tiles.multiply(self.instruction, t * vectors + v, a, b)
            at["x"] += self.depth
            at["w"] += self.right.blocks.size * width
        target, target_pitch = sums
        for t, v, register in accumulators:
            tiles.store(register, target + t * ROWS * target_pitch + v * LINE, target_pitch)


class StoredSums(Mapping[tuple[int, int], Value]):
    """Accumulators of a tile in scratch memory, {(row, vector): value}; indexing loads one and finishes it."""

    def __init__(self, isa: Isa, address: Value, pitch: int, shape: tuple[int, int], exact: bool,
                 finish: Callable[[int, Value], Value]) -> None:
        """Make a mapping. shape: rows, columns; finish: returns the value of an accumulator of a row."""
        self._isa, self._address, self._pitch, self._finish = isa, address, pitch, finish
        self._rows, self._columns = shape
        self._type = isa.ints if exact else isa.floats

    def __getitem__(self, index: tuple[int, int]) -> Value:
        m, v = index
        f = self._address.f
        if v * self._isa.lanes >= self._columns:        # a vector without columns
            return self._finish(m, f.constant(0, self._type))
        return self._finish(m, f.load(self._type, self._address + (m * self._pitch + v * LINE), LINE, "sum"))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(m, v) for m in range(self._rows) for v in range(self._isa.vectors_for(self._columns))])

    def __len__(self) -> int:
        return self._rows * self._isa.vectors_for(self._columns)


def instruction(precision: str, isa: Isa) -> str:
    """Return the instruction of the unit for factors as `product_arithmetic` stores them, or ""."""
    if isa.matrix is None or product_arithmetic(precision, isa).elements == 1:      # elements widened to float32
        return ""
    return isa.matrix.product(precision)


def row_tiles(f: Function, name: str, rows: int, step: int) -> Iterator[tuple[Value, int]]:
    """Yield (start, count) of whole tiles in a loop, then of the rest, whose count may be symbolic."""
    if not isinstance(rows, SymbolicInt):
        yield from f.tiles(name, rows, step)
        return
    whole = f.constant(rows // step, I64)
    for tile in f.range(name, whole.like(0), whole):
        yield tile * step, step
    rest = rows % step
    with f.when(f.constant(rest, I64).compare("ne", 0)):
        yield f.constant(rows - rest, I64), rest


def pieces(f: Function, count: int, step: int) -> Iterator[tuple[Value, int]]:
    """Yield (start, size) of pieces of a tile's rows: one, or powers of two if their number is symbolic."""
    if isinstance(count, SymbolicInt):
        yield from f.tail(count, step)
    else:
        yield f.constant(0, I64), count


def tile_cycles(rows: int, depth_bytes: int, columns: int) -> float:
    """Return the cycles of a product of matrices on the unit: its products and the stores of its accumulators."""
    tiles = -(-rows // ROWS) * -(-columns // (LINE // 4))
    return tiles * (-(-depth_bytes // AMX.row_bytes) * AMX.product_cycles + AMX.store_cycles)
