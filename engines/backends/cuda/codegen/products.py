"""Products of a thread, of a warp (mma) and of four warps (wgmma), in one form for every type and architecture.

In bytes the fragments of all of them are the same. A step multiplies 32 bytes of K: a tile of 16 pixels by 8 couts is

    a       four words of a lane: rows g and g + 8, bytes 4 t.. and 16 + 4 t..      lane = 4 g + t
    b       two words: cout g, bytes 4 t.. and 16 + 4 t..
    sums    four of a lane: row g, couts 2 t and 2 t + 1; then row g + 8

but for the halves of sm_70 (m8n8k4), where two times four lanes, 16 apart, multiply 8 rows by 8 couts, 8 bytes of K at
a time. The rows that a lane brings there (`quad_rows`) are chosen so that its sums are of the same form: two rows,
`apart` from each other, and the couts of a t.

Meanings: the PTX ISA, "Matrix multiply-accumulate" and "Asynchronous warpgroup-level matrix instructions".
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engines.backends.cuda.codegen.gpu import Gpu
from engines.backends.cuda.codegen.module import fields, struct, wide
from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import FLOAT, I1, I32, vector

STEP = 32       # bytes of K


def dot(gpu: Gpu, precision: str, acc: Value, a: Value, b: Value) -> Value:
    """acc + the sum of products of the elements in two words: four bytes (u8 x s8), two halves, or one float."""
    if precision == "int8":
        return acc.f.call(I32, "llvm.nvvm.idp4a.u.s", a, b, acc, hint="dot")
    for x, w in zip(_floats(gpu, precision, a), _floats(gpu, precision, b), strict=True):
        acc = gpu.fma(x, w, acc)
    return acc


def dot_signed(acc: Value, a: Value, b: Value) -> Value:
    """The same of four bytes in each word, all signed."""
    return acc.f.call(I32, "llvm.nvvm.idp4a.s.s", a, b, acc, hint="dot")


def dot_pair(acc: Value, a: Value, b: Value, half: int, signed: bool) -> Value:
    """acc + the two int16 in a times bytes 2 half and 2 half + 1 of b, which may be unsigned."""
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


def load_tiles(address: Value, across: bool = False) -> list[Value]:
    """Four tiles of 8 rows of 16 bytes (ldmatrix); lane 8 i + r says where row r of tile i is, lane 4 g + t gets bytes
    4 t.. of row g of each. across: bytes 2 g and 2 g + 1 of rows 2 t and 2 t + 1."""
    name = f"llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4{'.trans' if across else ''}.b16.p3"
    return fields(address.f.call(struct(I32, 4), name, address, hint="tiles"))


def multiply(gpu: Gpu, precision: str, acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """acc + a * b of a warp, STEP bytes of K."""
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
    """The same of bytes; types: s8 or u8, of both factors or of each ("u8.s8")."""
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
    """Whose sums a lane has, of 16 pixels by 8 couts: those of a row and of the one `apart`, couts 2 t and 2 t + 1."""
    row: Value
    apart: int
    t: Value


def sums_of(gpu: Gpu, precision: str, lane: Value) -> Sums:
    if gpu.by_quads(precision):
        return Sums(_quad_row(lane), 4, (lane.binary("lshr", 1) & 1) + (lane.binary("lshr", 2) & 2))
    return Sums(lane.binary("lshr", 2), 8, lane & 3)


# ---- quads
def _quad_row(lane: Value) -> Value:
    return (lane & 1) + (lane.binary("lshr", 1) & 0b1010)


def quad_rows(lane: Value) -> tuple[Value, Value]:
    """The rows, of 16 pixels and of 16 couts, whose K this lane brings to `multiply_quads`: bits 4 1 2 0 of the lane
    make the one, so that eight lanes find their chunks in eight groups of banks, bits 4 3 1 0 the other."""
    return _quad_row(lane) + (lane.binary("shl", 1) & 4), (lane & 3) + (lane.binary("lshr", 1) & 0b1100)


def multiply_quads(acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """acc + a * b of a warp, 16 pixels by 16 couts, two words of halves of each lane; sums of the first 8 couts, then
    of the others."""
    a, b = ([v.f.cast("bitcast", v, vector(2, "half"), "halves") for v in part] for part in (a, b))
    return _mma("m8n8k4.row.col.f32.f32", FLOAT, acc, a, b)


# ---- four warps
def descriptor(address: Value) -> Value:
    """Rows of 128 bytes in shared memory as wgmma finds them: the chunk of 16 bytes c of row r lies at c ^ r % 8."""
    f = address.f
    place = (f.op(I32, f"ptrtoint {address} to i32", "place") & 0x3FFFF).binary("lshr", 4)
    rows_of_8, turned_by_128 = 1024 >> 4, 1
    return wide(place) + (1 << 16 | rows_of_8 << 32 | turned_by_128 << 62)


_GROUPED = {"int8": ("k32.s32.u8.s8", "1", "r"), "fp16": ("k16.f32.f16.f16", "1, 1, 1, 0, 0", "f"),
            "bf16": ("k16.f32.bf16.bf16", "1, 1, 1, 0, 0", "f")}


def multiply_grouped(precision: str, couts: int, acc: Sequence[Value],
                     pairs: Sequence[tuple[Value, Value]]) -> list[Value]:
    """acc[64 pixels][couts] += a * b for each pair of descriptors, STEP bytes of K each, in one go of four warps.

    What these wrote to shared memory must have been made visible by `fence_grouped`. A lane's sums are those of
    `multiply`, for 16 pixels of its warp and 8 couts after 8 couts.
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
    """What this thread stored or copied to shared memory will be seen by wgmma after the next barrier."""
    f.write('call void asm sideeffect "fence.proxy.async.shared::cta;", "~{memory}"()')
