"""Factors of a product of two tensors that are both computed at run time, shared by its kernels.

    a [M, K] b [K, N]           M x N tiles of it in registers, all of K

    left, right = Left(Matrix.of(a), arithmetic, isa), Right(Matrix.of(b), arithmetic, isa, vectors)
    right.pack(b's address, scratch, right.zero(numbers, 1))
    sums = right.multiply(a's address, left.pitch, a panel in scratch, (rows, columns))

The kernel packs the right factor into scratch, in the layout of a contraction's weights: [panel of N][step of K]
[vector][lane][element], with zeros past K and N. The left factor is read in place, and copied only if the inner step
cannot read its layout or dtype.

A factor stored as uint8 means stored - zero point. Float arithmetic subtracts it on the way (the difference has 8 bits
and a sign, which bfloat16 holds exactly too). In INT8 a right element is packed as stored - 128, or unchanged if it is
stored as int8; the kernel adds the terms of the zero points to the sums.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes, from_float, to_float
from infer_server.engines.backends.llvm.kernels.common.access import transposed
from infer_server.engines.backends.llvm.kernels.common.arithmetic import Arithmetic, Operand, add_step, arithmetic_for
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import ELEMENTS, FLOAT, I8, I32, I64, lanes_of, vector
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.problems.matmul import MIDDLE
from infer_server.engines.lowering.problems.view import SIZES, View

AHEAD = 16              # prefetch distance in rows of a factor that is not packed: a panel's parts of them are too
                        # far apart for the hardware prefetcher


def product_arithmetic(precision: str, isa: Isa) -> Arithmetic:
    """Return the arithmetic of a precision.

    Floats that the machine cannot multiply as stored are widened by the packing.
    """
    return arithmetic_for(precision if precision == "int8" or precision == "bf16" and isa.bf16 else "fp32", isa)


@dataclass(frozen=True)
class Matrix:
    """Factor in memory: rows x columns elements, `strides` in bytes, of which one is the element's size."""
    dtype: str
    rows: int
    columns: int
    strides: tuple[int, int]

    @property
    def size(self) -> int:
        return SIZES[self.dtype]

    @staticmethod
    def of(view: View) -> Matrix:
        """Return the matrix of the last two axes of a view."""
        return Matrix(view.dtype, view.shape[-2], view.shape[-1], (view.strides[-2], view.strides[-1]))

    @property
    def transposed(self) -> Matrix:
        return Matrix(self.dtype, self.columns, self.rows, self.strides[::-1])

    def at(self, address: Value, row: Value | int, column: Value | int) -> Value:
        """Return the address of an element."""
        for index, stride in zip((row, column), self.strides, strict=True):
            address = address + index * stride
        return address


@dataclass(frozen=True)
class Factor:
    """Base class of the two factors of a product."""
    matrix: Matrix
    arithmetic: Arithmetic
    isa: Isa

    @property
    def exact(self) -> bool:
        """Return True for integers, whose zero points are not subtracted on the way."""
        return self.arithmetic.exact

    def zero(self, numbers: Value, index: int) -> Value | None:
        """Load the zero point that is subtracted from stored elements into all lanes; None if there is none.

        numbers: address of the float constant "numbers"; index: which of them it is.
        """
        if self.exact or self.matrix.dtype != "uint8":
            return None
        return numbers.f.splat(numbers.f.load(FLOAT, numbers + 4 * index, hint="zero"), self.isa.lanes)


# ---- the right factor
@dataclass(frozen=True)
class Right(Factor):
    """Right factor [K, N], packed into panels of `vectors` vectors of columns, or read in place if `direct`."""
    vectors: int
    packed: bool = True

    @property
    def steps(self) -> int:
        """Return the iterations of the K loop."""
        return -(-self.matrix.rows // self.arithmetic.elements)

    @property
    def width(self) -> int:
        """Return the columns of a panel."""
        return self.vectors * self.isa.lanes

    @property
    def panel_bytes(self) -> int:
        return self.steps * self.vectors * self.arithmetic.weight_bytes(self.isa)

    @property
    def direct(self) -> bool:
        """Return True if it can be read in place: its rows are what the inner step loads."""
        stored = (self.matrix.dtype, self.arithmetic.elements, self.matrix.strides[1])
        return stored == (self.arithmetic.weights_dtype, 1, self.matrix.size)

    @property
    def _shift(self) -> int:
        """Return the number that is subtracted from a byte when it is packed (INT8)."""
        return MIDDLE if self.matrix.dtype == "uint8" else 0

    @property
    def bytes(self) -> int:
        """Return the bytes of all panels."""
        return -(-self.matrix.columns // self.width) * self.panel_bytes

    @property
    def padded_columns(self) -> int:
        """Return the columns, rounded up to full panels if their number is symbolic and they are contiguous along K.

        The added columns repeat the last one, and their sums are not used. A last panel whose rows are contiguous is
        not filled.
        """
        columns = self.matrix.columns
        if isinstance(columns, SymbolicInt) and self.matrix.strides[1] != self.matrix.size:
            return -(-columns // self.width) * self.width
        return columns

    def pack(self, source: Value, target: Value, zero: Value | None) -> None:
        """Pack all panels."""
        for start, columns in source.f.tiles("packed panel", self.padded_columns, self.width):
            here = self.matrix.at(source, 0, start)
            last = None
            if self.padded_columns is not self.matrix.columns:
                last = source.f.constant(self.matrix.columns - 1, I64) - start
            self.pack_panel(here, columns, target + start.divided(self.width) * self.panel_bytes, zero, last)

    def pack_panel(self, source: Value, columns: int, target: Value, zero: Value | None,
                   last: Value | None = None) -> None:
        """Pack one panel of `columns` columns from `source` on; columns past number `last` repeat that one."""
        vectors = self.isa.vectors_for(columns)
        pitch = vectors * self.arithmetic.weight_bytes(self.isa)
        for v in range(vectors):
            count = min(max(columns - v * self.isa.lanes, 0), self.isa.lanes)
            here = self.matrix.at(source, 0, v * self.isa.lanes)
            there = target + v * self.arithmetic.weight_bytes(self.isa)
            if self.matrix.strides[1] == self.matrix.size:
                self._from_rows(here, count, there, pitch, zero)
            elif last is None:
                self._from_columns(here, count, there, pitch, zero)
            else:
                self._from_columns(source, count, there, pitch, zero, last, v * self.isa.lanes)

    def _from_rows(self, source: Value, count: int, target: Value, pitch: int, zero: Value | None) -> None:
        """Pack a vector of columns of a matrix with contiguous rows; `elements` rows make a step."""
        f, elements, row_bytes, lanes = source.f, self.arithmetic.elements, self.matrix.strides[0], self.isa.lanes
        rows, last = self.matrix.rows, None
        if isinstance(rows, SymbolicInt) and elements > 1:
            last, rows = f.constant(rows - 1, I64), -(-rows // elements) * elements
        for row, size in f.tiles("packed row", rows, elements):
            parts: list[Value] = []
            for index in (row + e for e in range(elements)):
                part = self._absent(f, lanes)
                if count and len(parts) < size:
                    here = index if last is None else index.at_most(last)
                    there = self._elements(source + here * row_bytes, count, lanes, zero)
                    part = there if last is None else f.select(index.compare("ule", last), there, part)
                parts.append(part)
            self._store(self._joined(parts), target + row.divided(elements) * pitch)

    def _from_columns(self, source: Value, count: int, target: Value, pitch: int, zero: Value | None,
                      last: Value | None = None, first: int = 0) -> None:
        """Pack a vector of contiguous columns: `lanes` steps of each, transposed in registers.

        last, first: column j is number first + j from `source` on, but no further than `last`.
        """
        def column(j: int) -> Value | int:
            return j if last is None else last.like(first + j).at_most(last)

        lanes, elements = self.isa.lanes, self.arithmetic.elements
        for row, size in source.f.tiles("packed run", self.matrix.rows, lanes * elements):
            columns = [self._elements(self.matrix.at(source, row, column(j)), size, lanes * elements, zero) if j < count
                       else self._absent(source.f, lanes * elements) for j in range(lanes)]
            there = target + row.divided(elements) * pitch
            for i, words in enumerate(transposed([self._words(column) for column in columns])):
                if i * elements < size:
                    self._store(words, there + i * pitch)

    # ---- products with packed panels
    def column_sums(self, panel: Value, columns: int) -> list[Value]:
        """Return the sums of a packed panel's columns, as packed: a vector of int32 for each of its vectors (INT8)."""
        f, isa, vectors = panel.f, self.isa, self.isa.vectors_for(columns)
        ones = isa.unsigned(f.constant(1, vector(isa.bytes, I8)))
        sums = {v: f.constant(0, isa.ints) for v in range(vectors)}
        at = {"w": panel}
        for _ in f.loop("k", self.steps, sums=sums, at=at):
            for v in range(vectors):
                sums[v] = isa.dot4(sums[v], ones, isa.ready_weights(at["w"] + v * isa.ready_bytes))
            at["w"] += vectors * isa.ready_bytes
        return list(sums.values())

    def multiply(self, x: Value, pitch: int, panel: Value, shape: tuple[int, int],
                 start: Sequence[Sequence[Value]] = ()) -> dict[tuple[int, int], Value]:
        """Return `sums` as float32."""
        sums = self.sums(x, pitch, panel, shape, start)
        return {key: self.arithmetic.finish(self.isa, value) for key, value in sums.items()}

    def sums(self, x: Value, pitch: int, panel: Value, shape: tuple[int, int],
             start: Sequence[Sequence[Value]] = ()) -> dict[tuple[int, int], Value]:
        """Return the accumulators of a tile, {(row, vector): value}.

        shape: rows, `pitch` bytes apart, by columns of the panel. start: [row][vector], initial accumulators instead of
        zero.
        """
        f, isa, arithmetic = x.f, self.isa, self.arithmetic
        rows, vectors, step = shape[0], isa.vectors_for(shape[1]), arithmetic.weight_bytes(isa)
        pitch_of_w = vectors * step if self.packed else self.matrix.strides[0]
        acc = {(m, v): start[m][v] if start else arithmetic.zero(isa, x) for m in range(rows) for v in range(vectors)}
        at = {"x": x, "w": panel}
        for _ in f.loop("k", self.steps, acc=acc, at=at):
            add_step(arithmetic, isa, acc, at["x"], {m: m * pitch for m in range(rows)}, at["w"],
                     lambda w: [self._step(w + v * step, shape[1] - v * isa.lanes) for v in range(vectors)])
            for v in () if self.packed else range(vectors):
                isa.prefetch(at["w"] + (AHEAD * pitch_of_w + v * step))
            at["x"] += arithmetic.step_bytes
            at["w"] += pitch_of_w
        return acc

    def _step(self, address: Value, columns: int) -> Operand:
        """Load a vector of a step; of a factor that is not packed, at most `columns` columns."""
        if self.packed:
            return self.arithmetic.weights(self.isa, address)
        count = min(max(columns, 0), self.isa.lanes)
        return (self._elements(address, count, self.isa.lanes, None) if count else
                self._absent(address.f, self.isa.lanes),)

    # ---- elements in the dtype of the arithmetic; a word is a step of one lane
    def _elements(self, address: Value, count: int, width: int, zero: Value | None) -> Value:
        """Load `count` contiguous elements into a vector of `width`."""
        f, element = address.f, ELEMENTS[self.matrix.dtype]
        if self.exact:
            return _padded(f.load(vector(count, element), address, hint="bytes"), width, -self._shift)
        if self.matrix.dtype == self.arithmetic.weights_dtype:
            return _padded(f.load(vector(count, element), address, hint="stored"), width, 0)
        parts = []
        for first in range(0, width, self.isa.lanes):
            some = min(max(count - first, 0), self.isa.lanes)
            here = address + first * self.matrix.size
            parts.append(converted(self.isa, self.matrix.dtype, self.arithmetic.weights_dtype, here, some, zero)
                         if some else self._absent(f, self.isa.lanes))
        return parts[0] if len(parts) == 1 else f.shuffle(parts[0], parts[1], range(width), "run")

    def _absent(self, f: Function, width: int) -> Value:
        if self.exact:
            return f.constant(-self._shift, vector(width, I8))
        return f.constant(0, vector(width, ELEMENTS[self.arithmetic.weights_dtype]))

    def _joined(self, rows: list[Value]) -> Value:
        """Combine rows into words: element e of each word is from rows[e]."""
        if len(rows) == 1:
            return rows[0]
        bits, words = 32 // len(rows), None
        for e, row in enumerate(rows):
            wide = row.f.cast("zext", row, self.isa.ints, "wide")
            wide = wide.binary("shl", e * bits) if e else wide
            words = wide if words is None else words.binary("or", wide)
        assert words is not None
        return words

    def _words(self, elements: Value) -> Value:
        if self.arithmetic.elements == 1:
            return elements
        return elements.f.cast("bitcast", elements, self.isa.ints, "words")

    def _store(self, words: Value, address: Value) -> None:
        f = address.f
        if not self.exact:
            f.store(words, address, self.isa.bytes)
            return
        signed = f.cast("bitcast", words, vector(self.isa.bytes, I8), "quads")
        if self._shift:
            signed = signed.binary("xor", -self._shift)
        for i, part in enumerate(self.isa.spread(signed)):
            f.store(part, address + i * self.isa.bytes, self.isa.bytes)


def converted(isa: Isa, source: str, target: str, address: Value, count: int, zero: Value | None) -> Value:
    """Load `count` contiguous elements, convert them to another dtype and subtract `zero`.

    The result has `lanes` elements; those past `count` come from zeros.
    """
    stored = _padded(address.f.load(vector(count, ELEMENTS[source]), address, hint="stored"), isa.lanes, 0)
    if source == target and zero is None:
        return stored
    value = to_float(isa, source, stored)
    if zero is not None:
        value = value - zero
    return from_float(isa, target, value)


def _padded(stored: Value, width: int, fill: int) -> Value:
    """Widen a vector to `width` lanes, with `fill` in the new ones."""
    count = lanes_of(stored.type)
    if count == width:
        return stored
    return stored.f.shuffle(stored, stored.like(fill), [min(i, count) for i in range(width)], "padded")


def store_tile(lanes: Lanes, view: View, rows: int, result: Callable[[int], list[Value]], address: Value) -> None:
    """Store result(m), the vectors of row m, for each row of a tile whose first element is at `address`."""
    together = 4 // lanes.vectors       # rows whose vectors fill one register of bytes
    for first in range(0, rows, together):
        group = range(first, min(first + together, rows))
        lanes.store(view.dtype, [result(m) for m in group], [address + m * view.strides[-2] for m in group])


def integer(f: Function, numbers: Value, index: int) -> Value:
    """Load a float of the constant "numbers" and convert it to int32."""
    return f.cast("fptosi", f.load(FLOAT, numbers + 4 * index, hint="number"), I32, "number")


# ---- the left factor
@dataclass(frozen=True)
class Left(Factor):
    """Left factor [M, K], whose rows the inner step reads from memory."""

    @property
    def steps(self) -> int:
        return -(-self.matrix.columns // self.arithmetic.elements)

    @property
    def direct(self) -> bool:
        """Return True if it is read in place.

        The last step of bytes may read past a row: its weights there are zero.
        """
        whole = self.matrix.columns % self.arithmetic.elements == 0 or self.exact
        return self.matrix.dtype == self.arithmetic.dtype and self.matrix.strides[1] == self.matrix.size and whole

    @property
    def pitch(self) -> int:
        """Return the bytes between two rows as the inner step reads them."""
        return self.matrix.strides[0] if self.direct else self.steps * self.arithmetic.step_bytes

    def copy(self, source: Value, rows: int, target: Value, zero: Value | None) -> None:
        """Copy `rows` rows from `source` on in the dtype of the arithmetic, with zeros past K."""
        f, isa, dtype, elements = source.f, self.isa, self.arithmetic.dtype, self.arithmetic.elements
        for row in f.range("copied row", f.constant(0, I64), f.constant(rows, I64)):
            for column, count in f.tiles("copied part", self.matrix.columns, isa.lanes):
                here = self.matrix.at(source, row, column)
                stored = converted(isa, self.matrix.dtype, dtype, here, count, zero)
                if count < isa.lanes:
                    stored = _padded(f.shuffle(stored, None, range(count), "part"), -(-count // elements) * elements, 0)
                f.store(stored, target + row * self.pitch + column * SIZES[dtype])

    def row_sums(self, source: Value, target: Value) -> None:
        """Store the sums of all rows as int32 (INT8)."""
        f, isa = source.f, self.isa
        ones = isa.spread(f.constant(1, vector(isa.bytes, I8)))
        for row in f.loop("summed row", self.matrix.rows):
            total = {"sum": f.constant(0, isa.ints)}
            here = self.matrix.at(source, row, 0)
            for column, count in f.tiles("summed part", self.matrix.columns, isa.bytes, total=total):
                part = _padded(f.load(vector(count, I8), here + column, hint="bytes"), isa.bytes, 0)
                total["sum"] = isa.dot4(total["sum"], isa.unsigned(part), ones)
            value = total["sum"]
            distance = isa.lanes // 2
            while distance:
                value = value + f.shuffle(value, None, [i ^ distance for i in range(isa.lanes)], "others")
                distance //= 2
            f.store(f.op(I32, f"extractelement {value}, i32 0", "sum"), target + row * 4)
