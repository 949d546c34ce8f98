"""Table of compute capabilities, and the scalar primitives of a GPU thread.

Architectures differ in tensor-core instructions and asynchronous copies; everything else is plain LLVM IR. A new
architecture is a new line of the table.
"""
from __future__ import annotations

from dataclasses import dataclass

from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import FLOAT, I32, vector
from infer_server.engines.codegen.words import Primitives
from infer_server.engines.errors import ConfigError, did_you_mean

WARP = 32


@dataclass(frozen=True)
class Gpu(Primitives):
    """Compute capability with the scalar primitives of its threads."""
    name: str                   # sm_80
    ptx: int                    # PTX version: the lowest with the needed features, for the oldest drivers
    async_copy: bool = True     # cp.async: global to shared memory without registers
    int8_k: int = 32            # bytes of K per integer mma; 0: dp4a instead
    half_k: int = 32            # bytes of K per float16 mma; 8: m8n8k4 ("quads"); 0: fma
    bfloat: bool = True         # mma takes bfloat16, too
    grouped: bool = False       # wgmma: products of four warps, read from shared memory
    shared: int = 48 << 10      # bytes of shared memory per block

    lanes = 1
    natural = True

    def by_warp(self, precision: str) -> bool:
        """Return True if the precision has an mma of 16 rows, whose fragments all such products share."""
        halves = self.half_k >= 16
        return {"int8": self.int8_k > 0, "fp16": halves, "bf16": halves and self.bfloat}.get(precision, False)

    def by_quads(self, precision: str) -> bool:
        """Return True if the precision has mma.m8n8k4 only."""
        return precision == "fp16" and self.half_k == 8

    def has_mma(self, precision: str) -> bool:
        """Return True if the precision has an mma of any shape."""
        return self.by_warp(precision) or self.by_quads(precision)

    def round(self, x: Value) -> Value:
        """Round float32 to int32, halves to even, with saturation."""
        return x.f.call(I32, "llvm.nvvm.f2i.rn", x, hint="round")

    def halves(self, dtype: str, low: Value, high: Value) -> Value | None:
        """Convert two floats to float16 or bfloat16 in one word. Return None if the GPU has no instruction for it."""
        if not self.by_warp("bf16"):
            return None
        name, element = ("ff2f16x2", "half") if dtype == "float16" else ("ff2bf16x2", "bfloat")
        f, pair = low.f, vector(2, element)
        return f.cast("bitcast", f.call(pair, f"llvm.nvvm.{name}.rn", high, low, hint="halves"), I32, "word")

    def larger(self, a: Value, b: Value) -> Value:
        """Return the larger operand, or the other one if one is NaN.

        This is one instruction; `max`, which propagates NaN as the CPU does, is two.
        """
        return a.f.call(FLOAT, "llvm.maxnum.f32", a, b, hint="larger")

    def power_of_2(self, x: Value) -> Value:
        """Return 2**x with a relative error of 2**-22, in one instruction; 0 for -inf and below 2**-126."""
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
    """Return the architecture called `name`. Raise ConfigError if it is unknown."""
    if name not in GPUS:
        raise ConfigError(f"unknown GPU architecture '{name}'{did_you_mean(name, GPUS)}")
    return GPUS[name]
