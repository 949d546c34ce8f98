"""Instruction sets as tables: the vector operations that kernels use, and the machines that provide them.

A kernel uses vectors of `lanes` int32 or float32, and one INT8 primitive on each lane, exact in int32:
    dot4(acc, pixel, weights) = acc + sum over e in 0..3 of u8 pixel[e] * s8 weights[e]

Everything else is plain LLVM vector arithmetic. A new machine with vectors needs a new table, but no new kernel. A
machine with a matrix unit has a table of that too (tiles.py), for which there are separate kernels.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.backends.llvm.codegen.tiles import AMX, AMX_FP16, MatrixUnit
from infer_server.engines.codegen.ir_builder import Number, Value
from infer_server.engines.codegen.types import I8, I16, I32, overload, vector
from infer_server.engines.codegen.words import Primitives
from infer_server.engines.errors import ConfigError

Pixel = tuple[Value, ...]       # four bytes in every lane, in the form of the machine's dot4 operand
Weights = tuple[Value, ...]
Tiles = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Isa(Primitives):
    """Instruction set of a CPU. This base class uses plain LLVM vector arithmetic for all operations."""
    name: str
    lanes: int                              # int32 or float32 elements of a register
    registers: int                          # vector registers
    cpu: str                                # LLVM's target CPU ("" is the triple's baseline)
    features: str                           # LLVM's target features in addition to the CPU's
    requires: frozenset[str]                # features that /proc/cpuinfo must list
    triple: str = ""                        # LLVM's target triple; "" is that of this process
    packs: tuple[str, str] | None = None    # saturating inside each 128-bit part: 32 -> 16 signed, 16 -> 8 unsigned
    bf16: bool = False                      # has vdpbf16ps and vcvtneps2bf16
    tiles: Tiles = ((4, 2), (3, 2), (8, 1))     # (pixels, vectors) of a contraction that fit, the usual winner first
    float_tiles: Tiles = ()                 # tiles of float32 arithmetic, if they differ
    winograd_tiles: Tiles = ()              # tiles of a Winograd convolution's products; () if it never pays
    winograd_weights: int = 3 << 18         # most transformed weights of a Winograd convolution
    prefetched: float = 1.0                 # time in a network with prefetched weights, relative to one without
    paired_tiles: Tiles = ()                # tiles of paired INT8 weights (pairing.py); () without `paired_dot`
    half: Isa | None = None                 # the same machine with registers of half the width, for few channels
    matrix: MatrixUnit | None = None        # matrix unit, if it has one

    @property
    def bytes(self) -> int:
        return 4 * self.lanes

    @property
    def narrow(self) -> Isa:
        """Return `half`, or this table if it has no half."""
        return self.half or self

    def round(self, x: Value) -> Value:
        """Convert float32 to int32, rounding to even. Beyond +-2**31 the result is unspecified."""
        return x.f.call(self.ints, f"llvm.lrint.v{self.lanes}i32.v{self.lanes}f32", x, hint="round")

    def float_to_bfloat(self, x: Value) -> Value:
        """Round to bfloat16, ties to even, and return its bits.

        The instruction vcvtneps2bf16 flushes denormals, below 2**-126, to 0.
        """
        if not self.bf16:
            return super().float_to_bfloat(x)
        name, type_ = f"llvm.x86.avx512bf16.cvtneps2bf16.{8 * self.bytes}", vector(self.lanes, "bfloat")
        return x.f.cast("bitcast", x.f.call(type_, name, x, hint="bfloat"), vector(self.lanes, I16), "bits")

    @property
    def rounds_pairs(self) -> bool:
        """Return True if `floats_to_bfloats` takes as long as the conversion of one vector: on CPUs with AMX."""
        return self.bf16 and self.matrix is not None

    def floats_to_bfloats(self, low: Value, high: Value) -> Value:
        """Round two vectors as float_to_bfloat does, and return the bits of both as one vector."""
        name, type_ = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{8 * self.bytes}", vector(2 * self.lanes, "bfloat")
        both = low.f.call(type_, name, high, low, hint="bfloats")
        return low.f.cast("bitcast", both, vector(2 * self.lanes, I16), "bits")

    # ---- u8 in memory: `vectors` registers (1, 2 or 4) hold the channels of one pixel
    def vectors_for(self, channels: int) -> int:
        return next((n for n in (1, 2) if n * self.lanes >= channels), 4)

    def channel(self, vectors: int, v: int, lane: int) -> int:
        """Return the channel in this lane of vector v. The order compensates that packs work inside 128-bit parts."""
        part, element = divmod(lane, 4)
        return part * 4 * vectors + v * 4 + element

    def pack_u8(self, ints: Sequence[Value]) -> Value:
        """Pack four vectors of int32 into one of u8 with saturation, in the order that `channel` compensates."""
        f, shorts = ints[0].f, vector(2 * self.lanes, I16)
        if self.packs:
            low, high = (f.call(shorts, self.packs[0], *pair, hint="short") for pair in (ints[:2], ints[2:]))
            return f.call(vector(4 * self.lanes, I8), self.packs[1], low, high, hint="packed")
        quads = []      # shuffles that give the order of the packs: part by part, the four vectors' quads
        for vector_ in ints:
            low = f.call(self.ints, f"llvm.smax.v{self.lanes}i32", vector_, vector_.like(0), hint="low")
            high = f.call(self.ints, f"llvm.smin.v{self.lanes}i32", low, low.like(255), hint="high")
            quads.append(f.cast("trunc", high, vector(self.lanes, I8), "bytes"))
        lows, highs = (f.shuffle(a, b, range(2 * self.lanes), "pair") for a, b in (quads[:2], quads[2:]))
        mask = [v * self.lanes + part + e for part in range(0, self.lanes, 4) for v in range(4) for e in range(4)]
        return f.shuffle(lows, highs, mask, "packed")

    def prefetch(self, address: Value) -> None:
        """Prefetch a cache line into L2 for reading."""
        f = address.f
        f.run("llvm.prefetch.p0", address, *(f.constant(i, I32) for i in (0, 2, 1)))

    # ---- INT8 dot products. `pixel`: four bytes that all lanes share; `quads`: a loaded vector, four bytes a lane
    def pixel(self, address: Value) -> Pixel:
        """Load four bytes into every lane."""
        word = address.f.load(I32, address, hint="word")
        everywhere = address.f.splat(word, self.lanes)
        return self.unsigned(address.f.cast("bitcast", everywhere, vector(self.bytes, I8), "pixel"))

    def ready(self, quads: NDArray[np.int8]) -> NDArray[np.int8]:
        """Convert weights [..., lanes, 4] to the order and width that `ready_weights` loads."""
        return np.moveaxis(quads, -1, -2).ravel()

    def ready_weights(self, address: Value) -> Weights:
        """Load `ready_bytes` of weights that `ready` laid out; the address is aligned."""
        return tuple(address.f.load(type_, address + i * self.bytes, self.bytes, "weights")
                     for i, type_ in enumerate(self._ready_types))

    @property
    def ready_bytes(self) -> int:
        """Return the bytes of one vector of weights in the layout of `ready`."""
        return len(self._ready_types) * self.bytes

    @property
    def _ready_types(self) -> Sequence[str]:
        return [self.ints] * 4

    def spread(self, quads: Value) -> Weights:
        """Convert a vector of s8 weights to the form of `ready`, at run time."""
        words = quads.f.cast("bitcast", quads, self.ints, "words")
        return tuple(words.binary("shl", 24 - 8 * e).binary("ashr", 24) for e in range(4))

    def unsigned(self, quads: Value) -> Pixel:
        """Convert a vector of bytes to dot4's u8 operand."""
        words = quads.f.cast("bitcast", quads, self.ints, "words")
        return (*(words.binary("lshr", 8 * e).binary("and", 255) for e in range(3)), words.binary("lshr", 24))

    def dot4(self, acc: Value, pixel: Pixel, weights: Weights) -> Value:
        for x, w in zip(pixel, weights, strict=True):
            acc = acc + x * w
        return acc

    def shuffle_bytes(self, window: Value, indices: Value) -> Value:
        """Select bytes in each 128-bit part of `window` by these indices into the part."""
        raise NotImplementedError(f"{self.name} has no shuffle of bytes")

    def paired_dot(self, acc: Value, pixel: Value, weights: Value) -> Value:
        """Return dot4 of bytes, provided that no sum of two products overflows 16 bits (see pairing.py)."""
        raise NotImplementedError(f"{self.name} has no saturating products of bytes")

    def small_dot(self, acc: Value, quads: Value, others: Value) -> Value:
        """Return dot4 of bytes, those of `quads` below 128, so that no sum of two products overflows 16 bits."""
        return self.dot4(acc, self.unsigned(quads), self.spread(others))

    # ---- INT16
    one_dot2: ClassVar[bool] = False        # True if dot2 is one instruction

    def dot2(self, acc: Value, a: Value, b: Value) -> Value:
        """Return acc + the sum of two products of int16 in each lane; the sum wraps."""
        for e in (0, 1):
            x, y = (v.f.cast("sext", v.f.shuffle(v, None, range(e, 2 * self.lanes, 2), "half"), self.ints, "wide")
                    for v in (a, b))
            acc = acc + x * y
        return acc


class Portable(Isa):
    """Baseline of any processor.

    x86-64's baseline lacks some instructions, for which LLVM would call a maths library. Kernels are linked with none,
    so these operations are written out here, with the rounding of the instructions.
    """

    def fma(self, a: Value, b: Value | Number, c: Value | Number) -> Value:
        """Compute a fused multiply-add in float64, where the product is exact.

        The sum is rounded there and again to float32, as in functions.fma.
        """
        f, doubles = a.f, vector(self.lanes, "double")
        x, y, z = (f.cast("fpext", value, doubles, "double") for value in (a, a.like(b), a.like(c)))
        product = f.op(doubles, f"fmul {x}, {y.name}", "product")
        return f.cast("fptrunc", f.op(doubles, f"fadd {product}, {z.name}", "sum"), self.floats, "fma")

    def dot4(self, acc: Value, pixel: Pixel, weights: Weights) -> Value:
        """Add four products. Shifts tell LLVM that weights have 16 bits: x86-64's baseline has no products of 32."""
        return super().dot4(acc, pixel, tuple(w.binary("shl", 16).binary("ashr", 16) for w in weights))

    def unary(self, word: str, x: Value) -> Value:
        if word in ("sqrt", "fabs"):
            return super().unary(word, x)
        nearest = self._rint(x)
        if word == "floor":
            return x.f.select(nearest.compare("ogt", x), nearest - 1, nearest)
        if word == "ceil":
            return x.f.select(nearest.compare("olt", x), nearest + 1, nearest)
        assert word == "rint", word
        return nearest

    def _rint(self, x: Value) -> Value:
        """Round to even. From 2**23 on every float is an integer; below, adding and subtracting 2**23 rounds."""
        size = super().unary("fabs", x)
        rounded = (size + (1 << 23)) - (1 << 23)
        near = x.f.select(size.compare("olt", 1 << 23), rounded, size)
        return x.f.call(x.type, f"llvm.copysign.{overload(x.type)}", near, x, hint="rint")

    def half_to_float(self, halves: Value) -> Value:
        """Shift exponent and fraction into place; multiplying by 2**112 corrects the exponent's bias."""
        f = halves.f
        bits = f.cast("zext", f.cast("bitcast", halves, vector(self.lanes, I16), "bits"), self.ints, "bits")
        size, sign = bits.binary("and", 0x7FFF), bits.binary("and", 0x8000).binary("shl", 16)
        moved = f.cast("bitcast", size.binary("shl", 13), self.floats, "moved") * 2.0 ** 112
        moved = f.cast("bitcast", moved, self.ints, "moved")
        infinite = size.binary("shl", 13).binary("or", 0x7F800000)      # infinity or NaN
        result = f.select(size.compare("uge", 0x7C00), infinite, moved)
        return f.cast("bitcast", result.binary("or", sign), self.floats, "float")

    def float_to_half(self, x: Value) -> Value:
        f = x.f
        bits = f.cast("bitcast", x, self.ints, "bits")
        size, sign = bits.binary("and", 0x7FFFFFFF), bits.binary("lshr", 16).binary("and", 0x8000)
        odd = size.binary("lshr", 13).binary("and", 1)
        normal = (size - ((127 - 15) << 23) + 0xFFF + odd).binary("lshr", 13)
        # One unit of a denormal half is 2**-24, as is one of a float32 near 0.5: adding 0.5 leaves the half's bits.
        small = f.cast("bitcast", f.cast("bitcast", size, self.floats, "size") + 0.5, self.ints, "small") - 0x3F000000
        nan = f.select(size.compare("ugt", 0x7F800000), size.like(0x7E00), size.like(0x7C00))
        result = f.select(size.compare("ult", 0x38800000), small, normal)
        result = f.select(size.compare("uge", 0x47800000), nan, result)
        shorts = f.cast("trunc", result.binary("or", sign), vector(self.lanes, I16), "shorts")
        return f.cast("bitcast", shorts, vector(self.lanes, "half"), "half")


class Bytes(Isa):
    """Machines whose dot4 takes four bytes a lane directly."""

    def ready(self, quads: NDArray[np.int8]) -> NDArray[np.int8]:
        return quads.ravel()

    @property
    def _ready_types(self) -> Sequence[str]:
        return [vector(self.bytes, I8)]

    def spread(self, quads: Value) -> Weights:
        return (quads,)

    def unsigned(self, quads: Value) -> Pixel:
        return (quads,)


class Vnni(Bytes):
    """x86 with vpdpbusd. Its u8 operand must be a register; only the s8 operand can be in memory."""
    one_dot2 = True

    def dot4(self, acc: Value, pixel: Pixel, weights: Weights) -> Value:
        name = f"llvm.x86.avx512.vpdpbusd.{8 * self.bytes}"
        return acc.f.call(self.ints, name, acc, *pixel, *weights, hint="acc")

    def dot2(self, acc: Value, a: Value, b: Value) -> Value:
        words = (value.f.cast("bitcast", value, self.ints, "words") for value in (a, b))
        return acc.f.call(self.ints, f"llvm.x86.avx512.vpdpwssd.{8 * self.bytes}", acc, *words, hint="acc")


class Avx2(Isa):
    """x86 with AVX2: vpmaddwd on bytes widened to 16 bits, first the even bytes, then the odd ones.

    vpmaddubsw is shorter, but saturates; it serves weights that pairing.py paired.
    """

    def ready(self, quads: NDArray[np.int8]) -> NDArray[np.int8]:
        return np.stack([quads[..., 0::2], quads[..., 1::2]], -3).ravel()

    @property
    def _ready_types(self) -> Sequence[str]:
        return [vector(2 * self.lanes, I16)] * 2

    def _shorts(self, quads: Value) -> Value:
        return quads.f.cast("bitcast", quads, vector(2 * self.lanes, I16), "shorts")

    def spread(self, quads: Value) -> Weights:
        both = self._shorts(quads)
        return both.binary("shl", 8).binary("ashr", 8), both.binary("ashr", 8)

    def unsigned(self, quads: Value) -> Pixel:
        both = self._shorts(quads)
        return both.binary("and", 255), both.binary("lshr", 8)

    def dot4(self, acc: Value, pixel: Pixel, weights: Weights) -> Value:
        for x, w in zip(pixel, weights, strict=True):
            acc = self.dot2(acc, x, w)
        return acc

    def dot2(self, acc: Value, a: Value, b: Value) -> Value:
        return acc + acc.f.call(self.ints, "llvm.x86.avx2.pmadd.wd", a, b, hint="products")

    def shuffle_bytes(self, window: Value, indices: Value) -> Value:
        return window.f.call(window.type, "llvm.x86.avx2.pshuf.b", window, indices, hint="taken")

    def small_dot(self, acc: Value, quads: Value, others: Value) -> Value:
        return self.paired_dot(acc, quads, others)

    def paired_dot(self, acc: Value, pixel: Value, weights: Value) -> Value:
        shorts = vector(2 * self.lanes, I16)
        sums = acc.f.call(shorts, "llvm.x86.avx2.pmadd.ub.sw", pixel, weights, hint="sums")
        return self.dot2(acc, sums, sums.like(1))


class I8mm(Bytes):
    """aarch64 with usdot: u8 x s8, four products a lane, which is dot4."""

    def dot4(self, acc: Value, pixel: Pixel, weights: Weights) -> Value:
        return acc.f.call(self.ints, "llvm.aarch64.neon.usdot.v4i32.v16i8", acc, *pixel, *weights, hint="acc")


class DotProd(Bytes):
    """aarch64 with sdot only: x = (x - 128) + 128, and 128 * w = 64 * w + 64 * w, three dot products of s8."""

    def unsigned(self, quads: Value) -> Pixel:
        return (quads.binary("xor", -128),)

    def dot4(self, acc: Value, pixel: Pixel, weights: Weights) -> Value:
        half = weights[0].like(64)
        for x in (pixel[0], half, half):
            acc = acc.f.call(self.ints, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc, x, *weights, hint="acc")
        return acc


_PACKS_256 = ("llvm.x86.avx2.packssdw", "llvm.x86.avx2.packuswb")
_V3 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
_ARM = "aarch64-unknown-linux-gnu"

_TILES_256 = ((6, 2), (5, 2), (4, 2), (12, 1))
_WINOGRAD_256 = ((6, 2),)
_TILES_ARM = ((6, 4), (4, 4), (12, 2), (8, 2), (16, 1))

# prefetched: measured in INT8 networks on Zen 5. With AVX2 products take so long that weights arrive in time anyway.
_512: Any = dict(packs=("llvm.x86.avx512.packssdw.512", "llvm.x86.avx512.packuswb.512"), prefetched=0.94,
                 tiles=((14, 2), (12, 2), (6, 4), (4, 4), (7, 2), (8, 2), (16, 1)),
                 winograd_tiles=((14, 2), (6, 4)), winograd_weights=5 << 19)


def _avx512(name: str, features: str, requires: frozenset[str], bf16: bool = False,
            matrix: MatrixUnit | None = None) -> Isa:
    """Return an AVX-512 table and its half, which has as many registers, and tiles of one vector of couts."""
    machine: Any = dict(cpu="x86-64-v4", features=f"{features},-prefer-256-bit", requires=requires, bf16=bf16)
    half = Vnni(name, 8, 32, **machine, packs=_PACKS_256, tiles=((24, 1), (16, 1), (12, 1), (8, 1)), prefetched=0.94)
    return Vnni(name, 16, 32, **machine, **_512, half=half, matrix=matrix)


_AMX_FEATURES, _AMX_REQUIRES = "+avx512vnni,+avx512bf16,+amx-tile,+amx-int8,+amx-bf16", _V4 | {
    "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}
AVX512_AMX_FP16 = _avx512("avx512_amx_fp16", f"{_AMX_FEATURES},+amx-fp16", _AMX_REQUIRES | {"amx_fp16"}, bf16=True,
                          matrix=AMX_FP16)
AVX512_AMX = _avx512("avx512_amx", _AMX_FEATURES, _AMX_REQUIRES, bf16=True, matrix=AMX)
AVX512_BF16 = _avx512("avx512_bf16", "+avx512vnni,+avx512bf16", _V4 | {"avx512_bf16"}, bf16=True)
AVX512_VNNI = _avx512("avx512_vnni", "+avx512vnni", _V4)
AVX_VNNI = Vnni("avx_vnni", 8, 16, "x86-64-v3", "+avxvnni", _V3 | {"avx_vnni"}, packs=_PACKS_256, tiles=_TILES_256,
                winograd_tiles=_WINOGRAD_256)
# A pixel takes two registers (even and odd bytes); its weights are memory operands of the products.
AVX2 = Avx2("avx2", 8, 16, "x86-64-v3", "", _V3, packs=_PACKS_256, tiles=((5, 2), (3, 4), (4, 2), (12, 1)),
            float_tiles=_TILES_256, winograd_tiles=_WINOGRAD_256, winograd_weights=5 << 21,
            paired_tiles=((6, 2), (5, 2), (4, 2), (3, 4)))
AARCH64_I8MM = I8mm("aarch64_i8mm", 4, 32, "generic", "+neon,+i8mm", frozenset({"asimd", "i8mm"}), _ARM,
                    tiles=_TILES_ARM)
AARCH64_DOTPROD = DotProd("aarch64_dotprod", 4, 32, "generic", "+neon,+dotprod", frozenset({"asimd", "asimddp"}), _ARM,
                          tiles=_TILES_ARM)
AARCH64 = Isa("aarch64", 4, 32, "generic", "+neon", frozenset({"asimd"}), _ARM, float_tiles=_TILES_ARM)
PORTABLE = Portable("portable", 4, 16, "", "", frozenset(), float_tiles=_TILES_256)

# Best first: best_isa returns the first one whose features the machine has.
ALL = (AVX512_AMX_FP16, AVX512_AMX, AVX512_BF16, AVX512_VNNI, AVX_VNNI, AVX2, AARCH64_I8MM, AARCH64_DOTPROD, AARCH64,
       PORTABLE)


def isa_named(name: str) -> Isa:
    """Return the table of this name.

    Raises
    ------
    ConfigError
        No table has this name; the message lists the known ones.
    """
    for isa in ALL:
        if isa.name == name:
            return isa
    raise ConfigError(f"unknown target '{name}'; known targets: {', '.join(isa.name for isa in ALL)}")


def best_isa(features: frozenset[str]) -> Isa:
    """Return the best table for a machine with these features (as named in /proc/cpuinfo)."""
    return next(isa for isa in ALL if isa.requires <= features)
