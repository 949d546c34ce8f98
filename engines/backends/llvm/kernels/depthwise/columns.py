"""Pixels of x as operands of a depthwise convolution: each is loaded once and interleaved for the products.

    four elements   bytes interleaved twice: a lane holds a channel of four pixels, for one dot4
    two             shorts, made of bytes, interleaved once: a lane holds a channel of two pixels, for one dot2
    one             floats, widened to float32, for one fma

Bytes are interleaved inside 128-bit parts, which is one instruction on every machine; the channels are then in packed
order (Isa.channel).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.arithmetic import INT8, INT16, Arithmetic, Operand
from infer_server.engines.backends.llvm.kernels.common.cost import Work
from infer_server.engines.backends.llvm.kernels.depthwise.steps import Group, columns_read, rows_read
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import I8, I16, element_of, lanes_of, vector
from infer_server.engines.lowering.problems.convolution import Depthwise

Position = tuple[int, int]      # (row, column) of x, counted from the first tap of the tile's first output
ABSENT = -1, -1
T = TypeVar("T")


def integer_arithmetic(isa: Isa) -> Arithmetic:
    """Return the arithmetic of bytes, or of shorts on machines whose dot4 takes two instructions on shorts."""
    return INT16 if isa.ready_bytes == 2 * isa.bytes else INT8


class Columns:
    """Operands from x in a micro-kernel of rows x cols outputs.

    Pixels that these do not read are zeros with zero weights.
    """

    def __init__(self, problem: Depthwise, arithmetic: Arithmetic, lanes: Lanes, address: Value, rows: int,
                 cols: int) -> None:
        self._problem, self._arithmetic, self._lanes, self._address = problem, arithmetic, lanes, address
        self._rows, self._columns = rows_read(problem, 0, rows), columns_read(problem, cols)
        self._results: dict[Any, Any] = {}

    def operand(self, group: Group, column: int, v: int) -> Operand:
        """Return a vector of channels of a group that begins in this column."""
        return self._once(self._interleaved, group, column, v)

    def _once(self, make: Callable[..., T], *arguments: Any) -> T:
        """Return the result of make(*arguments), computed at most once; it stays in registers until its last use."""
        if (make, arguments) not in self._results:
            self._results[make, arguments] = make(*arguments)
        result: T = self._results[make, arguments]
        return result

    def _interleaved(self, group: Group, column: int, v: int) -> Operand:
        positions = [(row, column + k * self._problem.dilation[1]) for row in group.rows for k in range(group.across)]
        if self._arithmetic.elements == 1:
            return (self._lanes.load_natural(self._problem.x.dtype, self._at(*positions), v),)
        positions += [ABSENT] * (self._arithmetic.elements - len(positions))
        if self._arithmetic.elements == 2:
            positions = [positions[0], ABSENT, positions[1], ABSENT]
        low, high = (self._once(self._pairs, *pair, v // 2) for pair in (positions[:2], positions[2:]))
        shorts = _zipped(low, high, v % 2)
        return (shorts,) if self._arithmetic.elements == 2 else self._lanes.isa.unsigned(_of(I8, shorts))

    def _pairs(self, a: Position, b: Position, half: int) -> Value:
        """Interleave the bytes of two pixels."""
        return _of(I16, _zipped(self._once(self._bytes, a), self._once(self._bytes, b), half))

    def _bytes(self, position: Position) -> Value:
        lanes, (row, column) = self._lanes, position
        if row not in self._rows or column not in self._columns:
            return self._address.f.constant(0, vector(lanes.isa.bytes, I8))
        at = self._at(position)
        return _spread(lanes, at.f.load(vector(lanes.channels, I8), at, hint="row"))

    def _at(self, position: Position) -> Value:
        (row, column), strides = position, self._problem.x.strides
        return self._address + (row * strides[0] + column * strides[1])


def step_work(arithmetic: Arithmetic, vectors: int) -> Work:
    """Return the work of interleaving the pixels of a step. A single vector costs half of an interleaving of two."""
    zips = {1: 0, 2: max(vectors, 2), 4: 2 * max(vectors // 2, 1) + max(vectors, 2)}[arithmetic.elements]
    return Work(others=zips)


def pixel_work(arithmetic: Arithmetic, vectors: int) -> Work:
    """Return the work of loading a pixel."""
    if not arithmetic.exact:
        return Work(loads=vectors)
    return Work(loads=1, others=max(vectors // 2, 1) if arithmetic.elements == 2 else vectors < 4)


def _spread(lanes: Lanes, row: Value) -> Value:
    """Arrange a row of channels so that 128-bit part k begins with the channels that the vectors hold in part k."""
    f, wide, parts = row.f, 4 * lanes.vectors, lanes.isa.lanes // 4
    if lanes.channels < wide * parts:
        row = f.shuffle(row, None, [i if i < lanes.channels else -1 for i in range(wide * parts)], "row")
    if wide == 16:
        return row
    # Shuffle words: LLVM would merge a shuffle of bytes with the zips into a much longer sequence.
    words = f.cast("bitcast", row, vector(parts, f"i{8 * wide}"), "words")
    mask = [part if i == 0 else -1 for part in range(parts) for i in range(16 // wide)]
    return f.cast("bitcast", f.shuffle(words, None, mask, "spread"), vector(16 * parts, I8), "spread")


def _zipped(a: Value, b: Value, half: int) -> Value:
    """Interleave a and b inside each 128-bit part: their low halves (half 0) or their high halves (half 1)."""
    size, part = lanes_of(a.type), 16 if element_of(a.type) == I8 else 8
    mask = [first + half * part // 2 + i // 2 + i % 2 * size for first in range(0, size, part) for i in range(part)]
    return a.f.shuffle(a, b, mask, "zipped")


def _of(element: str, value: Value) -> Value:
    """Reinterpret a vector as bytes or as shorts."""
    if element_of(value.type) == element:
        return value
    count = lanes_of(value.type) * (2 if element == I8 else 1) // (1 if element == I8 else 2)
    return value.f.cast("bitcast", value, vector(count, element), "bits")
