"""Compute capabilities as a table: what a kernel may ask of a GPU, and the scalar words that programs run on.

A thread has scalars. What a warp of 32 threads multiplies together, and what is copied while it computes, differs from
one architecture to the next; everything else is plain LLVM. A new architecture is a new line of the table.
"""
from __future__ import annotations

from dataclasses import dataclass

from engines.codegen.ir_builder import Number, Value
from engines.codegen.types import FLOAT, I16, I32
from engines.errors import ConfigError, did_you_mean

WARP = 32


@dataclass(frozen=True)
class Gpu:
    """A compute capability, and the Machine that epilogue programs run on; operands but the first may be numbers."""
    name: str                   # sm_80
    ptx: int                    # version of the PTX that is written: the lowest that has what is used, so that every
                                # driver since then takes it
    async_copy: bool = True     # cp.async: global to shared memory past the registers
    int8_k: int = 32            # bytes of K of one integer product of a warp; 0: it has none, and dp4a instead
    half_k: int = 32            # ... of one product of halves; 0: fma instead
    bfloat: bool = True         # ... which may be bfloat16 as well
    grouped: bool = False       # wgmma: products of four warps, straight from shared memory
    shared: int = 48 << 10      # bytes of shared memory that a block may have

    def by_warp(self, precision: str) -> bool:
        """Whether a warp's threads multiply together (mma); else each makes its own sums."""
        return {"int8": self.int8_k > 0, "fp16": self.half_k > 0,
                "bf16": self.half_k > 0 and self.bfloat}.get(precision, False)

    # ---- float32
    def fma(self, a: Value, b: Value | Number, c: Value | Number) -> Value:
        return a.f.call(FLOAT, "llvm.fma.f32", a, a.like(b), a.like(c), hint="fma")

    def max(self, a: Value, b: Value | Number) -> Value:
        return a.f.select(a.compare("ogt", b), a, a.like(b), "max")

    def min(self, a: Value, b: Value | Number) -> Value:
        return a.f.select(a.compare("olt", b), a, a.like(b), "min")

    def unary(self, word: str, x: Value) -> Value:
        """word: sqrt, fabs, floor, ceil, rint."""
        return x.f.call(FLOAT, f"llvm.{word}.f32", x, hint=word)

    def compare(self, a: Value, order: str, b: Value | Number) -> Value:
        return a.compare(order, b)

    def select(self, test: Value, a: Value, b: Value) -> Value:
        return a.f.select(test, a, b)

    def like(self, x: Value, number: Number) -> Value:
        return x.like(number)

    def bits(self, x: Value) -> Value:
        return x.f.cast("bitcast", x, I32, "bits")

    def from_bits(self, bits: Value) -> Value:
        return bits.f.cast("bitcast", bits, FLOAT, "float")

    def to_float(self, ints: Value) -> Value:
        return ints.f.cast("sitofp", ints, FLOAT, "float")

    def round(self, x: Value) -> Value:
        """float32 -> int32, halves to even; saturated."""
        return x.f.call(I32, "llvm.nvvm.f2i.rn", x, hint="round")

    def narrowed(self, dtype: str, x: Value) -> Value:
        """The nearest numbers of float16 or bfloat16."""
        if dtype == "float16":
            return self.half_to_float(self.float_to_half(x))
        return self.bfloat_to_float(self.float_to_bfloat(x))

    # ---- halves; those of bfloat16 are i16
    def half_to_float(self, half: Value) -> Value:
        return half.f.cast("fpext", half, FLOAT, "float")

    def float_to_half(self, x: Value) -> Value:
        return x.f.cast("fptrunc", x, "half", "half")

    def bfloat_to_float(self, short: Value) -> Value:
        """A bfloat16 is the upper half of a float32."""
        return self.from_bits(short.f.cast("zext", short, I32, "wide") << 16)

    def float_to_bfloat(self, x: Value) -> Value:
        """Halves to even: add half of the last kept bit, less one where that bit is 0."""
        bits = self.bits(x)
        odd = bits.binary("lshr", 16) & 1
        return x.f.cast("trunc", (bits + odd + 0x7FFF).binary("lshr", 16), I16, "bfloat")


GPUS = {gpu.name: gpu for gpu in (
    Gpu("sm_61", 60, async_copy=False, int8_k=0, half_k=0),
    Gpu("sm_70", 60, async_copy=False, int8_k=0, half_k=0, shared=96 << 10),
    Gpu("sm_75", 65, async_copy=False, int8_k=16, half_k=16, bfloat=False, shared=64 << 10),
    Gpu("sm_80", 70, shared=163 << 10),
    Gpu("sm_86", 71, shared=99 << 10),
    Gpu("sm_89", 78, shared=99 << 10),
    Gpu("sm_90", 78, shared=227 << 10),
    Gpu("sm_90a", 84, grouped=True, shared=227 << 10),
    Gpu("sm_100", 86, shared=227 << 10),
    Gpu("sm_120", 87, shared=99 << 10))}


def gpu_named(name: str) -> Gpu:
    """The architecture of that name. Raises ConfigError: it is none of the table's."""
    if name not in GPUS:
        raise ConfigError(f"unknown GPU architecture '{name}'{did_you_mean(name, GPUS)}")
    return GPUS[name]
