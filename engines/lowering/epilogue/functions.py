"""Elementary functions as sequences of float32 instructions, written once for every target.

A function runs on a Machine: NumPy's defines its result, and a backend's emits code. Both round alike, so that kernels
equal the reference bit for bit. The comment of each polynomial has its range and error.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Floats = Any        # a machine's float32 vector, with +, -, *, / by vectors and numbers
Ints = Any          # a machine's vector of int32, with +, -, <<, >> (arithmetic) and &
Test = Any          # a machine's vector of booleans


class Machine(Protocol):
    """Operations that a program needs in addition to the operators of its vectors. b and c may be numbers."""
    def fma(self, a: Floats, b: Any, c: Any) -> Floats: ...         # a * b + c, rounded once
    def max(self, a: Floats, b: Any) -> Floats: ...                 # a where a > b, else b (also for NaN and zeros)
    def min(self, a: Floats, b: Any) -> Floats: ...                 # a where a < b, else b
    def unary(self, word: str, x: Floats) -> Floats: ...            # word: sqrt, fabs, floor, ceil, rint
    def compare(self, a: Any, order: str, b: Any) -> Test: ...      # olt, ole, ogt, oge, oeq of floats; ne of integers
    def select(self, test: Test, a: Floats, b: Floats) -> Floats: ...
    def like(self, x: Floats, number: float) -> Floats: ...         # a constant with the shape of x
    def bits(self, x: Floats) -> Ints: ...                          # bit pattern of each float
    def from_bits(self, bits: Ints) -> Floats: ...
    def to_float(self, ints: Ints) -> Floats: ...                   # conversion to float
    def round(self, x: Floats) -> Ints: ...                         # nearest integers, halves to even
    def parts(self, x: Floats) -> tuple[Any, Floats]: ...           # (n, x - n), n the nearest integers for `scaled`
    def scaled(self, x: Floats, n: Any) -> Floats: ...              # x * 2**n, if that is a normal number
    def narrowed(self, dtype: str, x: Floats) -> Floats: ...        # rounded to float16 or bfloat16


Function = Callable[..., Any]       # (machine, *vectors) -> vector


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c in NumPy, rounded once to float32; the product of two float32 is exact in float64."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def _at_least(machine: Machine, x: Floats, low: float) -> Floats:
    """Return the larger of x and low, NaN for NaN."""
    return machine.max(machine.like(x, low), x)


def _at_most(machine: Machine, x: Floats, high: float) -> Floats:
    return machine.min(machine.like(x, high), x)


def _polynomial(machine: Machine, x: Floats, coefficients: Sequence[float]) -> Floats:
    """Evaluate a polynomial by Horner's scheme, highest power first."""
    return _continued(machine, x, machine.fma(x, *coefficients[:2]), coefficients[2:])


def _continued(machine: Machine, x: Floats, result: Floats, coefficients: Sequence[float]) -> Floats:
    for coefficient in coefficients:
        result = machine.fma(result, x, coefficient)
    return result


# e**r for |r| <= ln(2) / 2: the polynomial of degree 5 with the least relative error, 1.05e-7, that is 1 + r near 0.
_EXP = (8.312457929816632e-3, 4.189014378180944e-2, 1.6667115407459013e-1, 4.9999231662394594e-1, 1.0, 1.0)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Near 1.5 * 2**23 the unit in the last place is 1: a sum rounds to an integer n, held in the low bits. With 127
# more the low bits are the exponent field of 2**n.
_INTEGERS = 1.5 * 2 ** 23 + 127


def _exp(machine: Machine, x: Floats) -> Floats:
    return _normal_exp(machine, _at_most(machine, _at_least(machine, x, -87.3), 88.0))


def _exp_of_negative(machine: Machine, x: Floats) -> Floats:
    return _normal_exp(machine, _at_least(machine, x, -87.3))


def _exp_down_to_0(machine: Machine, x: Floats) -> Floats:
    """Return e**x for x <= 0, and 0 where it underflows, as for masked scores."""
    return machine.select(machine.compare(x, "olt", -103.98), machine.like(x, 0), _exp_of_negative(machine, x))


def _normal_exp(machine: Machine, x: Floats) -> Floats:
    """Return e**x = 2**n * e**r with n = round(x / ln 2), |r| <= ln(2) / 2, for normal 2**n; error below 2e-7."""
    shifted = machine.fma(x, 1 / math.log(2), _INTEGERS)
    n = shifted - _INTEGERS
    r = machine.fma(n, -_LN2_HIGH, x)       # ln 2 in two parts: this product is exact
    r = machine.fma(n, -_LN2_LOW, r)
    p = _polynomial(machine, r, _EXP)
    return p * machine.from_bits(machine.bits(shifted) << 23)


def _any_exp(machine: Machine, x: Floats) -> Floats:
    """Return e**x = (e**(x / 2))**2: infinity above 88.72, 0 far below; error below 4e-7."""
    half = _exp(machine, x * 0.5)
    return half * half


def _sigmoid(machine: Machine, x: Floats) -> Floats:
    return 1 / (_exp(machine, 0 - x) + 1)


# tanh x = x p(x**2) / q(x**2) where |x| < 7.905, and 1 to the last bits beyond: the rational approximation of Eigen's
# generic_fast_tanh_float; relative error below 5e-7. It takes half the instructions of one by exp.
_TANH_LIMIT = 7.90531110763549805
_TANH_P = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
           1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)
_TANH_Q = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def _tanh(machine: Machine, x: Floats) -> Floats:
    x = _at_most(machine, _at_least(machine, x, -_TANH_LIMIT), _TANH_LIMIT)
    square = x * x
    p, q = (machine.fma(square, *coefficients[:2]) for coefficients in (_TANH_P, _TANH_Q))
    p, q = _continued(machine, square, p, _TANH_P[2:]), _continued(machine, square, q, _TANH_Q[2:])
    return x * p / q


# erf x = 1 - (polynomial in x)**-16 for x >= 0: Abramowitz & Stegun 7.1.28, |error| <= 3e-7. (7.1.26 is less accurate
# in float32.)
_ERF = (0.0000430638, 0.0002765672, 0.0001520143, 0.0092705272, 0.0422820123, 0.0705230784, 1.0)


def _erf(machine: Machine, x: Floats) -> Floats:
    a = _at_most(machine, machine.unary("fabs", x), 4.0)
    p = _polynomial(machine, a, _ERF)
    for _ in range(4):
        p = p * p
    y = 1 - 1 / p
    return machine.select(machine.compare(x, "olt", 0), y * -1, y)


@dataclass(frozen=True)
class Gate:
    """Gate x * step(x), where the step rises from 0 to 1: x (1/2 + near q(u)).

    near is x clipped to [-end, end], and u = 2 (near / end)**2 - 1. The step is a polynomial and needs no division. In
    u the coefficients are small; in x**2 they would cancel, with float32 errors of 3e-4. They are fitted by Lawson's
    algorithm for the least maximum error of the product under q(1) = 1 / (2 end), so that the step is exactly 0 or 1
    beyond the ends.
    """
    end: float
    coefficients: tuple[float, ...]     # coefficients of u**0, u**1, ...

    def __call__(self, machine: Machine, x: Floats) -> Floats:
        near = machine.min(machine.max(x, -self.end), self.end)
        u = machine.fma(near * near, 2 / self.end ** 2, -1.0)
        return x * machine.fma(near, self._q(machine, x, u), 0.5)

    def _q(self, machine: Machine, x: Floats, u: Floats) -> Floats:
        """Evaluate q by Estrin's scheme down to three terms, for half of Horner's dependency chain."""
        terms = [machine.like(x, coefficient) for coefficient in self.coefficients]
        while len(terms) > 3:
            paired = [machine.fma(u, odd, even) for even, odd in zip(terms[::2], terms[1::2], strict=False)]
            terms = [*paired, *terms[2 * len(paired):]]
            u = u * u
        *lower, result = terms
        for term in lower[::-1]:
            result = machine.fma(u, result, term)
        return result


# x Phi(x): absolute error below 2.2e-6, and below 3.4e-7 |x| beyond 5.
_GELU = Gate(5.0, (1.41363755e-1, -7.02984408e-2, 5.15246131e-2, -4.03866395e-2, 3.13650481e-2, -2.36618873e-2,
                   1.68802664e-2, -1.00634592e-2, 5.1558041e-3, -4.0079765e-3, 3.17372917e-3, -1.04481308e-3))
# For results stored in a byte: errors below 1/16 (SiLU: 1/10) of its unit, max(|x|, 1/2) / 255.
_GELU_U8 = Gate(3.5, (0.199394137, -0.0900131911, 0.0522459298, -0.0313684456, 0.0188512858, -0.00625257567))
_GELU_TANH_U8 = Gate(3.5, (0.199472502, -0.0900409818, 0.0518385731, -0.030816989, 0.0191690773, -0.00676503219))
_SILU_U8 = Gate(8.0, (0.087807022, -0.042114418, 0.0274583641, -0.0215534791, 0.0297212992, -0.0169348195,
                      -0.02430957, 0.00919075869, 0.0352444313, -0.0220095832))


# log x: x = 2**n * m with m in [sqrt(1/2), sqrt(2)); Cephes' logf.
_LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)


def _log(machine: Machine, x: Floats) -> Floats:
    bits = machine.bits(machine.max(x, 1.17549435e-38))
    n = bits - 0x3F3504F3 >> 23
    m = machine.from_bits(bits - (n << 23)) - 1
    p = _polynomial(machine, m, _LOG)
    y = machine.fma(m * m, -0.5, p * m * (m * m))
    turns = machine.to_float(n)
    y = machine.fma(turns, _LN2_LOW, y)
    return machine.fma(turns, _LN2_HIGH, m + y)


# log(1 + x) = x p(x) for x in [0, 1]: the polynomial of the least relative error under p(0) = 1, 3.3e-8.
_LOG1P = (5.364821292459965e-3, -3.0065780505537987e-2, 7.920452207326889e-2, -1.3753801584243774e-1,
          1.91536545753479e-1, -2.4857163429260254e-1, 3.332132399082184e-1, -4.9999648332595825e-1, 1.0)


def _log1p(machine: Machine, x: Floats) -> Floats:
    """Return log(1 + x) with relative error below 2e-7, in half the instructions of _log."""
    return x * _polynomial(machine, x, _LOG1P)


def _any_log(machine: Machine, x: Floats) -> Floats:
    y = _log(machine, x)
    y = machine.select(machine.compare(x, "oeq", 0), machine.like(x, -math.inf), y)     # used to make masks
    y = machine.select(machine.compare(x, "oeq", math.inf), machine.like(x, math.inf), y)
    return machine.select(machine.compare(x, "oge", 0), y, machine.like(x, math.nan))


# sin x: x = n pi / 2 + r with |r| <= pi / 4; n's last two bits select the sine or the cosine of r, and the sign
# (cos x = sin(x + pi / 2): n + 1). pi / 2 is in three parts, whose products with n are exact under fma; Cephes' sinf
# and cosf. Absolute error below 2e-7 up to |x| = 2**16; beyond, n pi / 2 cancels ever more of r's bits.
_HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100059307e-15)
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_TURNS = 1.5 * 2 ** 23      # near it the unit in the last place of a float32 is 1


def _sine(quarters: int) -> Function:
    """Return the function sin(x + quarters * pi / 2)."""
    def sine(machine: Machine, x: Floats) -> Floats:
        shifted = machine.fma(x, 2 / math.pi, _TURNS)
        n, r = shifted - _TURNS, x
        for part in _HALF_PI:
            r = machine.fma(n, -part, r)
        square = r * r
        s, c = (machine.fma(square, *coefficients[:2]) for coefficients in (_SINE, _COSINE))
        s, c = machine.fma(square, s, _SINE[2]), machine.fma(square, c, _COSINE[2])
        sine = machine.fma(square * r, s, r)
        cosine = machine.fma(square * square, c, machine.fma(square, -0.5, 1.0))
        turn = machine.bits(shifted) + quarters
        y = machine.select(machine.compare(turn & 1, "ne", 0), cosine, sine)
        return machine.select(machine.compare(turn & 2, "ne", 0), y * -1, y)
    return sine


# atan t = t p(t**2) for t in [0, 1]: the polynomial of the least relative error, 1.6e-8; atan x = pi / 2 - atan(1 / x).
_ATAN = (2.849888987839222e-3, -1.6068626195192337e-2, 4.2691513895988464e-2, -7.504294067621231e-2,
         1.0640934109687805e-1, -1.4203643798828125e-1, 1.999261975288391e-1, -3.333307206630707e-1, 1.0)


def _atan(machine: Machine, x: Floats) -> Floats:
    """Return atan x with relative error below 3e-7."""
    size = machine.unary("fabs", x)
    t = _at_most(machine, size, 1.0) / _at_least(machine, size, 1.0)
    y = t * _polynomial(machine, t * t, _ATAN)
    y = machine.select(machine.compare(size, "ogt", 1), math.pi / 2 - y, y)
    return machine.select(machine.compare(x, "olt", 0), y * -1, y)


# asin s = s + s z p(z), z = s**2, for s in [0, 1/2]; Cephes' asinf. Beyond, pi / 2 - 2 asin(sqrt((1 - x) / 2)).
_ASIN = (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)


def _halved(machine: Machine, size: Floats) -> tuple[Test, Floats]:
    """Reduce |x| for arcsin: return the test |x| > 1/2, and asin(|x|) or, if it holds, asin(sqrt((1 - |x|) / 2))."""
    beyond = machine.compare(size, "ogt", 0.5)
    z = machine.select(beyond, machine.fma(size, -0.5, 0.5), size * size)
    s = machine.select(beyond, machine.unary("sqrt", z), size)
    return beyond, machine.fma(s * z, _polynomial(machine, z, _ASIN), s)


def _asin(machine: Machine, x: Floats) -> Floats:
    """Return asin x with relative error below 4e-7."""
    beyond, y = _halved(machine, machine.unary("fabs", x))
    y = machine.select(beyond, machine.fma(y, -2.0, math.pi / 2), y)
    return machine.select(machine.compare(x, "olt", 0), y * -1, y)


def _acos(machine: Machine, x: Floats) -> Floats:
    """Return acos x with absolute error below 4e-7, which is relative near x = 1."""
    beyond, y = _halved(machine, machine.unary("fabs", x))
    negative = machine.compare(x, "olt", 0)
    far = machine.select(negative, machine.fma(y, -2.0, math.pi), y * 2)
    return machine.select(beyond, far, math.pi / 2 - machine.select(negative, y * -1, y))


FUNCTIONS: dict[str, Function] = {      # each a dependency chain of about a dozen instructions
    "exp": _any_exp,
    "exp_of_moderate": _exp,        # for x from -87 to 88
    "exp_of_negative": _exp_of_negative,        # x <= 0
    "exp_down_to_0": _exp_down_to_0,            # likewise
    "log": _any_log,
    "log_of_positive": _log,
    "log1p": _log1p,                # for x from 0 to 1
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "erf": _erf,
    "gelu": _GELU,
    "gelu_u8": _GELU_U8,
    "gelu_tanh_u8": _GELU_TANH_U8,
    "silu_u8": _SILU_U8,
    "sin": _sine(0),
    "cos": _sine(1),
    "atan": _atan,
    "asin": _asin,
    "acos": _acos,
}
