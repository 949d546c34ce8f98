"""Exponentials of attention scores, p = 2**(units * (x - maximum)).

Floats use one instruction. INT8 computes round(255 * 2**...) with the CPU's polynomial, bit for bit, from additions and
fma alone: a multiprocessor has 128 of these per cycle, but only 16 conversions between integers and floats. The nearest
integer thus comes from adding MAGIC (engines/backends/cuda/kernels/access.py), in the low bits of the float.
"""
from __future__ import annotations

from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.kernels.access import MAGIC
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.lowering.problems.exp2 import COEFFICIENTS, LOWEST
from infer_server.engines.lowering.problems.matmul import MIDDLE, Attention

MAGIC_BITS = 0x4B400000         # bits of MAGIC; adding a small integer adds it to the float


def power(gpu: Gpu, problem: Attention, x: Value, top: Value) -> Value:
    """Return p of a score, 0 for -inf. For INT8 the result is MAGIC + p, with p in its lowest byte."""
    below = (x - top) * float(problem.units)
    return _rounded(gpu, below) if problem.precision == "int8" else gpu.power_of_2(below)


def _rounded(gpu: Gpu, below: Value) -> Value:
    """Return MAGIC + the rounded byte of `exp2` (engines/lowering/problems/exp2.py)."""
    x = gpu.max(below, LOWEST)
    nearest = x + MAGIC
    rest = x - (nearest - MAGIC)
    *lower, last = COEFFICIENTS["uint8"]
    result = rest.like(last)
    for coefficient in lower[::-1]:
        result = gpu.fma(result, rest, coefficient)
    return gpu.from_bits(gpu.bits(result) + (gpu.bits(nearest) << 23)) + MAGIC  # the shift drops MAGIC's other bits


def converts_by_adding(problem: Attention) -> bool:
    """Return True if integer scores fit MAGIC's range: at most 255 * MIDDLE per column."""
    return 255 * MIDDLE * problem.q.shape[-1] < 1 << 22
