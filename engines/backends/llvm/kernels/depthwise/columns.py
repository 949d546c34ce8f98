"""What a depthwise convolution reads a column of x as: a step of its arithmetic is a channel of several rows.

    int8    four rows interleaved byte by byte: a lane holds a channel of four rows, for one dot4
    floats  one row, widened to float32, for one fma

The rows of bytes are interleaved inside 128-bit parts, where it is one instruction on every machine; the channels then
lie in packed order (Isa.channel).
"""
from __future__ import annotations

from collections.abc import Sequence

from engines.backends.llvm.codegen.ir_builder import I8, I16, Value, vector
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
    evens, odds = _zip_bytes(rows[0], rows[1], lanes.vectors), _zip_bytes(rows[2], rows[3], lanes.vectors)
    quads = [quad for a, b in zip(evens, odds, strict=True) for quad in _zip_shorts(a, b, lanes.vectors)]
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


def _zip_bytes(a: Value, b: Value, vectors: int) -> list[Value]:
    """Bytes of a and b in turn inside each 128-bit part, as shorts: the low halves, and the high ones if needed."""
    size = int(a.type[1:].split(" x ")[0])
    zipped = []
    for half in (0, 8)[:max(vectors // 2, 1)]:
        mask = [part + half + i // 2 + i % 2 * size for part in range(0, size, 16) for i in range(16)]
        pairs = a.f.shuffle(a, b, mask, "pairs")
        zipped.append(a.f.cast("bitcast", pairs, vector(size // 2, I16), "pairs"))
    return zipped


def _zip_shorts(a: Value, b: Value, vectors: int) -> list[Value]:
    """The same with shorts, as bytes: now each lane holds one channel of four rows."""
    size = int(a.type[1:].split(" x ")[0])
    zipped = []
    for half in (0, 4)[:vectors]:
        mask = [part + half + i // 2 + i % 2 * size for part in range(0, size, 8) for i in range(8)]
        quads = a.f.shuffle(a, b, mask, "quads")
        zipped.append(a.f.cast("bitcast", quads, vector(2 * size, I8), "quads"))
    return zipped
