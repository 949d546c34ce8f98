"""2**x for x <= 0: the exponential of a softmax, e**x = 2**(x / log 2).

    2**x = 2**n * 2**f      n = round(x), |f| <= 1/2; 2**f by a polynomial, n added to the exponent's bits

Below 2**-126 it is 0 or nearly so; of NaN it is NaN, and nearly 0 where it becomes a byte. The coefficients are minimax
in the relative error, fitted by Lawson's algorithm with p(0) = 1. Few of them do where the result is stored in few
bits: a bfloat16 has 2**-9, a byte 2**-9 of its largest value.
"""
from __future__ import annotations

import math
from typing import Any

from engines.lowering.epilogue.functions import Machine

LOG2_E = math.log2(math.e)
LOWEST = -126.0
# coefficients of f**1, f**2, ...; relative error 1.1e-7 and 1.0e-4
_FINE = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
_COARSE = (0.6932829022407532, 0.2422109693288803, 0.05500893294811249)
BYTE = 255.0            # what 2**0 is in a byte: its coefficients are that much greater
COEFFICIENTS = {"float32": (1.0, *_FINE), "bfloat16": (1.0, *_COARSE),
                "uint8": tuple(BYTE * c for c in (1.0, *_COARSE))}


def exp2(machine: Machine, x: Any, dtype: str) -> Any:
    """2**x, or 255 times that, as fine as `dtype` stores it."""
    x = machine.max(x, LOWEST) if dtype == "uint8" else machine.max(machine.like(x, LOWEST), x)
    n = machine.round(x)
    f = x - machine.to_float(n)
    *lower, last = COEFFICIENTS[dtype]
    result = machine.like(f, last)
    for coefficient in lower[::-1]:
        result = machine.fma(result, f, coefficient)
    return machine.from_bits(machine.bits(result) + (n << 23))
