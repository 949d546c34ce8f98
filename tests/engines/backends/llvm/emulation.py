"""The machine instructions that kernels use, defined in plain LLVM IR: name of the intrinsic -> text of its definition.

With `Module(emulation=EMULATION)` the text of any Isa runs on any machine, bit for bit, only slower. It is how the
kernels of machines that we do not have are tested, and nothing else.

Tile instructions are defined beside their text (codegen/tiles.py); their registers are memory of this process, so code
that uses them runs on one thread at a time.

Sources: Intel SDM (VPDPBUSD, VPDPWSSD, VPMADDWD, VPMADDUBSW, VPSHUFB, VPACKSSDW, VPACKUSWB, VDPBF16PS, VCVTNEPS2BF16),
Arm ARM (SDOT, USDOT).
"""
from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from infer_server.engines.backends.llvm.codegen.tiles import STATE_BYTES, meanings
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import FLOAT, I8, I16, I32, vector


class _Definition:
    """Text of `define result @emulated...(a, b, ...)`, whose body is written by the kernels' own builder."""

    def __init__(self, intrinsic: str, result: str, *types: str) -> None:
        self._head = f"define internal {result} @{intrinsic.replace('llvm.', 'emulated.', 1)}"
        self._types = {f"a{i}": type_ for i, type_ in enumerate(types)}
        self.f: Function = Module().function("body", False, **self._types)

    @property
    def arguments(self) -> Sequence[Value]:
        return list(self.f.parameters.values())

    def text(self, result: Value) -> str:
        arguments = ", ".join(f"{type_} %{name}" for name, type_ in self._types.items())
        return "\n".join([f"{self._head}({arguments}) nounwind {{", *self.f.lines, f"  ret {result}", "}"])


def _lanes(type_: str) -> int:
    return int(type_[1:].split(" x ")[0])


def _every(f: Function, value: Value, step: int, first: int, cast: str, element: str) -> Value:
    """Return elements first, first + step, ... widened to `type_`."""
    picked = f.shuffle(value, None, range(first, _lanes(value.type), step), "picked")
    return f.cast(cast, picked, vector(_lanes(picked.type), element), "wide")


def _dot4(name: str, lanes: int, unsigned: bool) -> str:
    """Return code for acc + sum over e in 0..3 of a[4 i + e] * b[4 i + e]; the sum wraps."""
    d = _Definition(name, vector(lanes, I32), vector(lanes, I32), vector(4 * lanes, I8), vector(4 * lanes, I8))
    acc, a, b = d.arguments
    for e in range(4):
        acc = acc + _every(d.f, a, 4, e, "zext" if unsigned else "sext", I32) * _every(d.f, b, 4, e, "sext", I32)
    return d.text(acc)


def _pmadd(name: str, lanes: int) -> str:
    """Return code for a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of int16 in int32; the sum wraps."""
    d = _Definition(name, vector(lanes, I32), vector(2 * lanes, I16), vector(2 * lanes, I16))
    a, b = d.arguments
    even, odd = (_every(d.f, a, 2, e, "sext", I32) * _every(d.f, b, 2, e, "sext", I32) for e in (0, 1))
    return d.text(even + odd)


def _dot2(name: str, lanes: int) -> str:
    """Return code for acc + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of int16 pairs in int32 lanes; the sum wraps."""
    words = vector(lanes, I32)
    d = _Definition(name, words, words, words, words)
    acc, *operands = d.arguments
    a, b = (d.f.cast("bitcast", value, vector(2 * lanes, I16), "halves") for value in operands)
    for e in (0, 1):
        acc = acc + _every(d.f, a, 2, e, "sext", I32) * _every(d.f, b, 2, e, "sext", I32)
    return d.text(acc)


def _pmadd_bytes(name: str, lanes: int) -> str:
    """Return code for a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of u8 and s8, saturated to int16."""
    d = _Definition(name, vector(lanes, I16), vector(2 * lanes, I8), vector(2 * lanes, I8))
    a, b = d.arguments
    even, odd = (_every(d.f, a, 2, e, "zext", I32) * _every(d.f, b, 2, e, "sext", I32) for e in (0, 1))
    return d.text(_saturated(even + odd, I16, -(1 << 15), (1 << 15) - 1))


def _sign_bytes(name: str, lanes: int) -> str:
    """Return code for a[i] if b[i] > 0, 0 if it is 0, else -a[i]; -(-128) wraps."""
    d = _Definition(name, vector(lanes, I8), vector(lanes, I8), vector(lanes, I8))
    a, b = d.arguments
    other = d.f.select(b.compare("slt", 0), a.like(0) - a, a.like(0))
    return d.text(d.f.select(b.compare("sgt", 0), a, other))


def _shuffle_bytes(name: str, lanes: int) -> str:
    """Return code for a[low 4 bits of b[i], in i's 128-bit lane], or 0 if b[i] < 0."""
    bytes_ = vector(lanes, I8)
    d = _Definition(name, bytes_, bytes_, bytes_)
    a, b = d.arguments
    result = d.f.constant(0, bytes_)
    for i in range(lanes):
        place = d.f.constant(i, I32)
        pick = d.f.op(I8, f"extractelement {b}, {place}", "pick")
        source = d.f.cast("zext", pick.binary("and", 15), I32, "source") + i // 16 * 16
        picked = d.f.op(I8, f"extractelement {a}, {source}", "picked")
        picked = d.f.select(pick.compare("slt", 0), picked.like(0), picked)
        result = d.f.op(bytes_, f"insertelement {result}, {picked}, {place}", "bytes")
    return d.text(result)


def _saturated(value: Value, narrow: str, low: int, high: int) -> Value:
    value = value.f.select(value.compare("slt", low), value.like(low), value)
    value = value.f.select(value.compare("sgt", high), value.like(high), value)
    return value.f.cast("trunc", value, vector(_lanes(value.type), narrow), "narrow")


def _pack(name: str, lanes: int, wide: str, narrow: str, low: int, high: int) -> str:
    """Return code that saturates and packs a and b per 128-bit lane, first a, then b."""
    d = _Definition(name, vector(2 * lanes, narrow), vector(lanes, wide), vector(lanes, wide))
    halves = [_saturated(value, narrow, low, high) for value in d.arguments]
    part = 128 // int(wide[1:])
    mask = [source + first + i for first in range(0, lanes, part) for source in (0, lanes) for i in range(part)]
    return d.text(d.f.shuffle(halves[0], halves[1], mask, "packed"))


def _dot_bfloat(name: str, lanes: int) -> str:
    """Return code for acc + a[2 i + 1] * b[2 i + 1], then + a[2 i] * b[2 i].

    Unlike this code the instruction also flushes denormals to zero.
    """
    pairs = vector(2 * lanes, "bfloat")
    d = _Definition(name, vector(lanes, FLOAT), vector(lanes, FLOAT), pairs, pairs)
    acc, *operands = d.arguments
    halves = [d.f.cast("bitcast", value, vector(2 * lanes, I16), "bits") for value in operands]
    for e in (1, 0):    # a product of two bfloat16 is exact in float32, so the sum rounds once, as the machine's does
        wide = [_every(d.f, half, 2, e, "zext", I32).binary("shl", 16) for half in halves]
        a, b = (d.f.cast("bitcast", value, vector(lanes, FLOAT), "float") for value in wide)
        acc = acc + a * b
    return d.text(acc)


def _to_bfloat(name: str, lanes: int) -> str:
    """Return code that rounds float32 to bfloat16, ties to even; denormals become signed zeros, NaN stays NaN."""
    d = _Definition(name, vector(lanes, "bfloat"), vector(lanes, FLOAT))
    return d.text(_rounded_to_bfloat(d, *d.arguments))


def _pair_to_bfloat(name: str, lanes: int) -> str:
    """Two vectors of float32 -> one of bfloat16, the second in the lower half."""
    d = _Definition(name, vector(2 * lanes, "bfloat"), *[vector(lanes, FLOAT)] * 2)
    high, low = (_rounded_to_bfloat(d, x) for x in d.arguments)
    return d.text(d.f.shuffle(low, high, range(2 * lanes), "both"))


def _rounded_to_bfloat(d: _Definition, x: Value) -> Value:
    lanes = _lanes(x.type)
    bits = d.f.cast("bitcast", x, vector(lanes, I32), "bits")
    size, upper = bits.binary("and", 0x7FFFFFFF), bits.binary("lshr", 16)
    result = (bits + upper.binary("and", 1) + 0x7FFF).binary("lshr", 16)
    result = d.f.select(size.compare("ult", 0x00800000), upper.binary("and", 0x8000), result)
    result = d.f.select(size.compare("ugt", 0x7F800000), upper.binary("or", 0x0040), result)
    shorts = d.f.cast("trunc", result, vector(lanes, I16), "bfloat")
    return d.f.cast("bitcast", shorts, vector(lanes, "bfloat"), "bfloat")


def _reduce(name: str, lanes: int) -> str:
    """Return x minus the nearest integer, halves to even, of |x| < 2**22: for no bits of fraction, without a mask."""
    floats = vector(lanes, FLOAT)
    d = _Definition(name, floats, floats, I32, floats, f"i{lanes}", I32)
    x = d.arguments[0]
    return d.text(x - ((x + 1.5 * 2 ** 23) - 1.5 * 2 ** 23))


def _scale(name: str, lanes: int) -> str:
    """Return x * 2**n for integers n from -126 to 127, without a mask."""
    floats = vector(lanes, FLOAT)
    d = _Definition(name, floats, floats, floats, floats, f"i{lanes}", I32)
    x, n = d.arguments[:2]
    exponent = d.f.cast("fptosi", n, vector(lanes, I32), "exponent") + 127
    return d.text(x * d.f.cast("bitcast", exponent.binary("shl", 23), floats, "power"))


def _definitions() -> dict[str, str]:
    table = {}
    for bits in (128, 256, 512):
        name = f"llvm.x86.avx512.vpdpbusd.{bits}"
        table[name] = _dot4(name, bits // 32, unsigned=True)
        name = f"llvm.x86.avx512.vpdpwssd.{bits}"
        table[name] = _dot2(name, bits // 32)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{bits}"
        table[name] = _dot_bfloat(name, bits // 32)
    for bits in (256, 512):     # LLVM has no plain form of the 128-bit one
        name = f"llvm.x86.avx512bf16.cvtneps2bf16.{bits}"
        table[name] = _to_bfloat(name, bits // 32)
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    table[name] = _pair_to_bfloat(name, 16)
    for word, define in (("reduce", _reduce), ("scalef", _scale)):
        name = f"llvm.x86.avx512.mask.{word}.ps.512"
        table[name] = define(name, 16)
    for name, unsigned in (("usdot", True), ("sdot", False)):
        name = f"llvm.aarch64.neon.{name}.v4i32.v16i8"
        table[name] = _dot4(name, 4, unsigned)
    for name, lanes in (("llvm.x86.avx2.pmadd.wd", 8), ("llvm.x86.avx512.pmaddw.d.512", 16)):
        table[name] = _pmadd(name, lanes)
    name = "llvm.x86.avx2.pmadd.ub.sw"
    table[name] = _pmadd_bytes(name, 16)
    name = "llvm.x86.avx2.psign.b"
    table[name] = _sign_bytes(name, 32)
    name = "llvm.x86.avx2.pshuf.b"
    table[name] = _shuffle_bytes(name, 32)
    for prefix, suffix, bits in (("avx2", "", 256), ("avx512", ".512", 512)):
        name = f"llvm.x86.{prefix}.packssdw{suffix}"
        table[name] = _pack(name, bits // 32, I32, I16, -(1 << 15), (1 << 15) - 1)
        name = f"llvm.x86.{prefix}.packuswb{suffix}"
        table[name] = _pack(name, bits // 16, I16, I8, 0, 255)
    return table


def _reserved(size: int) -> int:
    """Return the address of writable memory, the same one in each process if it is free.

    Texts contain the address; the object cache finds them again only if it does not change.
    """
    allocate = ctypes.CDLL(None, use_errno=True).mmap
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    address = allocate(1 << 44, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert address != ctypes.c_void_p(-1).value, f"no memory for the tile registers (errno {ctypes.get_errno()})"
    return address


EMULATION = _definitions() | meanings(_reserved(STATE_BYTES))
