"""Products of a thread, of a warp (mma) and of four warps (wgmma), with one interface for all types and architectures.

Counted in bytes, all their fragments are alike. A step multiplies 32 bytes of K; for a tile of 16 pixels by 8 couts
lane 4 g + t has

    a       four words: rows g and g + 8, bytes 4 t.. and 16 + 4 t..
    b       two words: cout g, bytes 4 t.. and 16 + 4 t..
    sums    four: row g, couts 2 t and 2 t + 1; then row g + 8

The exception is float16 on sm_70 (m8n8k4, "quads"): two groups of four lanes, 16 apart, multiply 8 rows by 8 couts by 8
bytes of K. The rows that a lane loads there (`quad_rows`) are chosen so that its sums have the same form: two rows,
`apart` from each other, and the couts of a t.

Reference: PTX ISA, "Matrix multiply-accumulate" and "Asynchronous warpgroup-level matrix instructions".
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.codegen.module import fields, struct, wide
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import FLOAT, I1, I32, vector

STEP = 32       # bytes of K


def dot(gpu: Gpu, precision: str, acc: Value, a: Value, b: Value) -> Value:
    """Return acc + the dot product of two words: four bytes (u8 x s8), two halves, or one float."""
    if precision == "int8":
        return acc.f.call(I32, "llvm.nvvm.idp4a.u.s", a, b, acc, hint="dot")
    for x, w in zip(_floats(gpu, precision, a), _floats(gpu, precision, b), strict=True):
        acc = gpu.fma(x, w, acc)
    return acc


def dot_signed(acc: Value, a: Value, b: Value) -> Value:
    """Return acc + the dot product of four signed bytes in each word."""
    return acc.f.call(I32, "llvm.nvvm.idp4a.s.s", a, b, acc, hint="dot")


def dot_pair(acc: Value, a: Value, b: Value, half: int, signed: bool) -> Value:
    """Return acc + the dot product of two int16 in a with bytes 2 half and 2 half + 1 of b, signed or not."""
    f, name = acc.f, f"llvm.nvvm.idp2a.s.{'s' if signed else 'u'}"
    return f.call(I32, name, a, b, f.constant(half, I1), acc, hint="dot")


def _floats(gpu: Gpu, precision: str, word: Value) -> list[Value]:
    f = word.f
    if precision == "fp32":
        return [gpu.from_bits(word)]
    if precision == "bf16":
        return [gpu.from_bits(word << 16), gpu.from_bits(word & -65536)]
    pair = f.cast("bitcast", word, vector(2, "half"), "halves")
    return [gpu.half_to_float(f.op("half", f"extractelement {pair}, i32 {i}", "half")) for i in (0, 1)]


def load_tiles(address: Value, transposed: bool = False) -> list[Value]:
    """Load four tiles of 8 rows of 16 bytes with ldmatrix.

    Lane 8 i + r gives the address of row r of tile i. Lane 4 g + t gets bytes 4 t.. of row g of each tile or, if
    `transposed`, bytes 2 g and 2 g + 1 of rows 2 t and 2 t + 1 (transposed).
    """
    name = f"llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.b16.p3"
    return fields(address.f.call(struct(I32, 4), name, address, hint="tiles"))


def multiply(gpu: Gpu, precision: str, acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """Return acc + a * b of a warp for STEP bytes of K."""
    if precision == "int8":
        return multiply_bytes(gpu, "u8.s8", acc, a, b)
    if precision == "bf16":
        return _mma("m16n8k16.row.col.bf16", FLOAT, acc, a, b)
    a, b = ([v.f.cast("bitcast", v, vector(2, "half"), "halves") for v in part] for part in (a, b))
    if gpu.half_k == STEP:
        return _mma("m16n8k16.row.col.f32.f32", FLOAT, acc, a, b)
    result = list(acc)
    for k in (0, 1):
        result = _mma("m16n8k8.row.col.f32.f32", FLOAT, result, a[2 * k:2 * k + 2], [b[k]])
    return result


def multiply_bytes(gpu: Gpu, types: str, acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """Return acc + a * b of a warp for STEP bytes of K.

    `types` is "s8" or "u8" for both factors, or one for each ("u8.s8").
    """
    if gpu.int8_k == STEP:
        return _mma(f"m16n8k32.row.col.{types}", I32, acc, a, b)
    low, high = list(acc[:2]), list(acc[2:])
    for k in (0, 1):
        low = _mma(f"m8n8k16.row.col.{types}", I32, low, [a[2 * k]], [b[k]])
        high = _mma(f"m8n8k16.row.col.{types}", I32, high, [a[2 * k + 1]], [b[k]])
    return [*low, *high]


def _mma(shape: str, type_: str, acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    f = acc[0].f
    return fields(f.call(struct(type_, len(acc)), f"llvm.nvvm.mma.{shape}", *a, *b, *acc, hint="mma"))


class Sums(NamedTuple):
    """Position of a lane's sums among 16 pixels by 8 couts: rows `row` and `row + apart`, couts 2 t and 2 t + 1."""
    row: Value
    apart: int
    t: Value


def sums_of(gpu: Gpu, precision: str, lane: Value) -> Sums:
    """Return the position of a lane's sums."""
    if gpu.by_quads(precision):
        return Sums(_quad_row(lane), 4, (lane.binary("lshr", 1) & 1) + (lane.binary("lshr", 2) & 2))
    return Sums(lane.binary("lshr", 2), 8, lane & 3)


# ---- quads
def _quad_row(lane: Value) -> Value:
    return (lane & 1) + (lane.binary("lshr", 1) & 0b1010)


def quad_rows(lane: Value) -> tuple[Value, Value]:
    """Return the rows, of 16 pixels and of 16 couts, that a lane loads for `multiply_quads`.

    Bits 4 1 2 0 of the lane's number make the row of pixels, so that eight lanes read from eight groups of banks; bits
    4 3 1 0 make the row of couts.
    """
    return _quad_row(lane) + (lane.binary("shl", 1) & 4), (lane & 3) + (lane.binary("lshr", 1) & 0b1100)


def multiply_quads(acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """Return acc + a * b of a warp for 16 pixels by 16 couts and two words of halves per lane.

    The sums of the first 8 couts come before those of the others.
    """
    a, b = ([v.f.cast("bitcast", v, vector(2, "half"), "halves") for v in part] for part in (a, b))
    return _mma("m8n8k4.row.col.f32.f32", FLOAT, acc, a, b)


# ---- four warps
def descriptor(address: Value) -> Value:
    """Return wgmma's descriptor of rows of 128 bytes in shared memory, where chunk c of row r lies at c ^ r % 8."""
    f = address.f
    place = (f.op(I32, f"ptrtoint {address} to i32", "place") & 0x3FFFF).binary("lshr", 4)
    rows_of_8, turned_by_128 = 1024 >> 4, 1
    return wide(place) + (1 << 16 | rows_of_8 << 32 | turned_by_128 << 62)


_GROUPED = {"int8": ("k32.s32.u8.s8", "1", "r"), "fp16": ("k16.f32.f16.f16", "1, 1, 1, 0, 0", "f"),
            "bf16": ("k16.f32.bf16.bf16", "1, 1, 1, 0, 0", "f")}


def multiply_grouped(precision: str, couts: int, acc: Sequence[Value],
                     pairs: Sequence[tuple[Value, Value]]) -> list[Value]:
    """Return acc[64 pixels][couts] + a * b for pairs of descriptors, STEP bytes of K each, by one wgmma of four warps.

    Shared memory must have been published by `fence_grouped`. A lane's sums are those of `multiply` for 16 pixels of
    its warp, 8 couts at a time.
    """
    f, count = acc[0].f, len(acc)
    shape, ending, letter = _GROUPED[precision]
    sums = ", ".join(f"${i}" for i in range(count))
    lines = ["wgmma.fence.sync.aligned;"]
    lines += [f"wgmma.mma_async.sync.aligned.m64n{couts}{shape} {{{sums}}}, ${2 * count + 2 * i}, "
              f"${2 * count + 2 * i + 1}, {ending};" for i in range(len(pairs))]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    constraints = [*[f"={letter}"] * count, *map(str, range(count)), *["l"] * (2 * len(pairs)), "~{memory}"]
    text, result = "\\0A".join(lines), struct(acc[0].type, count)
    arguments = ", ".join(map(str, [*acc, *(d for pair in pairs for d in pair)]))
    call = f'call {result} asm sideeffect "{text}", "{",".join(constraints)}"({arguments})'
    return fields(f.op(result, call, "group"))


def fence_grouped(f: Function) -> None:
    """Publish this thread's stores and copies to shared memory for wgmma after the next barrier."""
    f.write('call void asm sideeffect "fence.proxy.async.shared::cta;", "~{memory}"()')
