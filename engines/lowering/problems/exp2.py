"""2**x for x <= 0, the exponential of softmax: e**x = 2**(x / log 2).

    2**x = 2**n * 2**f      n = round(x), |f| <= 1/2; 2**f by a polynomial, n added to the exponent's bits

The result is 0 or nearly so below 2**-126; for NaN it is NaN, or nearly 0 if it becomes a byte. Coefficients minimise
the relative error (Lawson's algorithm, p(0) = 1). Results with few bits need few of them: bfloat16 has a precision of
2**-9, a byte 2**-9 of its largest value.
"""
from __future__ import annotations

import math
from typing import Any

from infer_server.engines.lowering.epilogue.functions import Machine

LOG2_E = math.log2(math.e)
LOWEST = -126.0
# coefficients of f**1, f**2, ...; relative error 1.1e-7 and 1.0e-4
_FINE = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
_COARSE = (0.6932829022407532, 0.2422109693288803, 0.05500893294811249)
BYTE = 255.0            # 2**0 in a byte; its coefficients are scaled by it
COEFFICIENTS = {"float32": (1.0, *_FINE), "bfloat16": (1.0, *_COARSE),
                "uint8": tuple(BYTE * c for c in (1.0, *_COARSE))}


def exp2(machine: Machine, x: Any, dtype: str) -> Any:
    """Return 2**x, or 255 * 2**x for "uint8", with the precision of the stored `dtype`."""
    x = machine.max(x, LOWEST) if dtype == "uint8" else machine.max(machine.like(x, LOWEST), x)
    n, f = machine.parts(x)
    *lower, last = COEFFICIENTS[dtype]
    result = machine.like(f, last)
    for coefficient in lower[::-1]:
        result = machine.fma(result, f, coefficient)
    return machine.scaled(result, n)
