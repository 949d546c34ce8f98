"""Compute capabilities as a table: what a kernel may ask of a GPU, and the scalar words that programs run on.

A thread has scalars. What a warp of 32 threads multiplies together, and what is copied while it computes, differs from
one architecture to the next; everything else is plain LLVM. A new architecture is a new line of the table.
"""
from __future__ import annotations

from dataclasses import dataclass

from engines.codegen.ir_builder import Value
from engines.codegen.types import FLOAT, I32, vector
from engines.codegen.words import Primitives
from engines.errors import ConfigError, did_you_mean

WARP = 32


@dataclass(frozen=True)
class Gpu(Primitives):
    """A compute capability, and the words of its threads, which are scalars."""
    name: str                   # sm_80
    ptx: int                    # version of the PTX that is written: the lowest that has what is used, so that every
                                # driver since then takes it
    async_copy: bool = True     # cp.async: global to shared memory past the registers
    int8_k: int = 32            # bytes of K of one integer product of a warp; 0: it has none, and dp4a instead
    half_k: int = 32            # ... of one product of halves; 8: its fragments are those of quads; 0: fma instead
    bfloat: bool = True         # ... which may be bfloat16 as well
    grouped: bool = False       # wgmma: products of four warps, straight from shared memory
    shared: int = 48 << 10      # bytes of shared memory that a block may have

    lanes = 1
    natural = True

    def by_warp(self, precision: str) -> bool:
        """Whether a warp's threads multiply together (mma), with the fragments that all such products share; else each
        makes its own sums, or they do it by quads."""
        halves = self.half_k >= 16
        return {"int8": self.int8_k > 0, "fp16": halves, "bf16": halves and self.bfloat}.get(precision, False)

    def by_quads(self, precision: str) -> bool:
        """Whether two times four threads of a warp multiply together (mma.m8n8k4)."""
        return precision == "fp16" and self.half_k == 8

    def multiplies_together(self, precision: str) -> bool:
        """Whether they do so in any way."""
        return self.by_warp(precision) or self.by_quads(precision)

    def round(self, x: Value) -> Value:
        """float32 -> int32, halves to even; saturated."""
        return x.f.call(I32, "llvm.nvvm.f2i.rn", x, hint="round")

    def halves(self, dtype: str, low: Value, high: Value) -> Value | None:
        """Two numbers of float16 or bfloat16 in a word, by one instruction: GPUs that multiply bfloat16 have it, for
        others None."""
        if not self.by_warp("bf16"):
            return None
        name, element = ("ff2f16x2", "half") if dtype == "float16" else ("ff2bf16x2", "bfloat")
        f, pair = low.f, vector(2, element)
        return f.cast("bitcast", f.call(pair, f"llvm.nvvm.{name}.rn", high, low, hint="halves"), I32, "word")

    def larger(self, a: Value, b: Value) -> Value:
        """Of a number and what is none, the number: one instruction, where `max`, which says what comes of both as a
        CPU does, is two."""
        return a.f.call(FLOAT, "llvm.maxnum.f32", a, b, hint="larger")

    def power_of_2(self, x: Value) -> Value:
        """2**x by one instruction, within 2**-22 of it; 0 of minus infinity and below 2**-126."""
        return x.f.call(FLOAT, "llvm.nvvm.ex2.approx.ftz.f", x, hint="power")


GPUS = {gpu.name: gpu for gpu in (
    Gpu("sm_61", 60, async_copy=False, int8_k=0, half_k=0),
    Gpu("sm_70", 64, async_copy=False, int8_k=0, half_k=8, bfloat=False, shared=96 << 10),
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
