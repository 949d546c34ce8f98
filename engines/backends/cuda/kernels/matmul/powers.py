"""The exponentials p of an attention's scores x: 2**(x - the largest), in units of log 2.

Floats: one instruction of a GPU. INT8: round(255 * 2**...) is the CPU's polynomial, bit for bit, out of additions and
fused products alone. A multiprocessor makes 128 of those in a cycle and 16 conversions between integers and floats; so
the nearest integer comes of adding MAGIC (engines/backends/cuda/kernels/access.py), in a float's lowest bits.
"""
from __future__ import annotations

from engines.backends.cuda.codegen.gpu import Gpu
from engines.backends.cuda.kernels.access import MAGIC
from engines.codegen.ir_builder import Value
from engines.lowering.problems.exp2 import COEFFICIENTS, LOWEST
from engines.lowering.problems.matmul import MIDDLE, Attention

MAGIC_BITS = 0x4B400000         # of MAGIC: an integer added to them is in its lowest bits


def power(gpu: Gpu, problem: Attention, x: Value, top: Value) -> Value:
    """p of a score; 0 of minus infinity. In INT8 MAGIC + p: a byte, in the lowest."""
    below = (x - top) * float(problem.units)
    return _rounded(gpu, below) if problem.precision == "int8" else gpu.power_of_2(below)


def _rounded(gpu: Gpu, below: Value) -> Value:
    """What `exp2` says of a byte (engines/lowering/problems/exp2.py), rounded."""
    x = gpu.max(below, LOWEST)
    nearest = x + MAGIC
    rest = x - (nearest - MAGIC)
    *lower, last = COEFFICIENTS["uint8"]
    result = rest.like(last)
    for coefficient in lower[::-1]:
        result = gpu.fma(result, rest, coefficient)
    return gpu.from_bits(gpu.bits(result) + (gpu.bits(nearest) << 23)) + MAGIC      # MAGIC's own bits leave at the top


def converts_by_adding(problem: Attention) -> bool:
    """Whether the sums of a score are small enough for MAGIC: 255 times MIDDLE for each column at most."""
    return 255 * MIDDLE * problem.q.shape[-1] < 1 << 22
