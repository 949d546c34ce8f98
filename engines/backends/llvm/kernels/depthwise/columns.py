"""What a depthwise convolution reads a column of x as: a step of its arithmetic is a channel of several rows.

    int8    four rows interleaved byte by byte: a lane holds a channel of four rows, for one dot4
    floats  one row, widened to float32, for one fma

The rows of bytes are interleaved inside 128-bit parts, where it is one instruction on every machine; the channels then
lie in packed order (Isa.channel).
"""
from __future__ import annotations

from collections.abc import Sequence

from engines.backends.llvm.codegen.ir_builder import I8, I16, Value, lanes_of, vector
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.common.arithmetic import Arithmetic, Operand
from engines.backends.llvm.tuning.cost import Work


def load_column(arithmetic: Arithmetic, lanes: Lanes, dtype: str, addresses: Sequence[Value]) -> list[Operand]:
    """Rows of one column of x, at most as many as the arithmetic has elements -> an operand for each vector of
    channels."""
    if not arithmetic.exact:
        return [(value,) for value in lanes.load(dtype, addresses[0])]
    f = addresses[0].f
    rows = [_spread(lanes, f.load(vector(lanes.channels, I8), address, hint="row")) for address in addresses]
    rows += [f.constant(0, rows[0].type)] * (4 - len(rows))
    evens, odds = (_zipped(rows[i], rows[i + 1], max(lanes.vectors // 2, 1), I16, "pairs") for i in (0, 2))
    quads = [quad for a, b in zip(evens, odds, strict=True) for quad in _zipped(a, b, lanes.vectors, I8, "quads")]
    return [lanes.isa.unsigned(quad) for quad in quads[:lanes.vectors]]


def column_work(arithmetic: Arithmetic, isa: Isa, vectors: int, rows: int) -> Work:
    """What `load_column` costs for all groups of `rows` rows."""
    if not arithmetic.exact:
        return Work(loads=rows * vectors)
    groups, spread = -(-rows // 4), 0 if vectors == 4 else rows
    widening = 2 * vectors * groups if isa.ready_bytes > isa.bytes else 0
    return Work(others=spread + groups * (2 * max(vectors // 2, 1) + vectors) + widening, loads=rows)


def _spread(lanes: Lanes, row: Value) -> Value:
    """A row of channels, so that part k of 128 bits begins with the channels that the vectors hold in part k."""
    f, wide, parts = row.f, 4 * lanes.vectors, lanes.isa.lanes // 4
    if lanes.channels < wide * parts:
        row = f.shuffle(row, None, [i if i < lanes.channels else -1 for i in range(wide * parts)], "row")
    if wide == 16:
        return row
    # As words: LLVM would merge a shuffle of bytes with the zips into something far longer.
    words = f.cast("bitcast", row, vector(parts, f"i{8 * wide}"), "words")
    mask = [part if i == 0 else -1 for part in range(parts) for i in range(16 // wide)]
    return f.cast("bitcast", f.shuffle(words, None, mask, "spread"), vector(16 * parts, I8), "spread")


def _zipped(a: Value, b: Value, halves: int, element: str, hint: str) -> list[Value]:
    """Elements of a and b in turn inside each 128-bit part: the low halves, and the high ones if needed. As vectors of
    `element`: bytes become shorts, and of the shorts each lane then holds one channel of four rows."""
    size, zipped = lanes_of(a.type), []
    part, count = (16, size // 2) if element == I16 else (8, 2 * size)      # elements of 128 bits; those of the result
    for half in (0, part // 2)[:halves]:
        mask = [first + half + i // 2 + i % 2 * size for first in range(0, size, part) for i in range(part)]
        both = a.f.shuffle(a, b, mask, hint)
        zipped.append(a.f.cast("bitcast", both, vector(count, element), hint))
    return zipped
