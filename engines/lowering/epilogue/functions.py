"""Functions as lines of float32 instructions: what numpy says they mean, and the same on a vector, bit for bit.

Each has its polynomial, where it holds and how far it errs beside it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import Value
from engines.backends.llvm.codegen.isa import Isa


@dataclass(frozen=True)
class Meaning:
    meaning: Callable[..., Any]
    emit: Callable[..., Value]


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once to float32: the product of two float32 is exact in float64."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


# e**r for |r| <= ln(2) / 2: the polynomial of degree 5 with the least relative error, 1.05e-7, that is 1 + r near 0.
_EXP = (8.312457929816632e-3, 4.189014378180944e-2, 1.6667115407459013e-1, 4.9999231662394594e-1, 1.0, 1.0)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Near 1.5 * 2**23 the last bit of a float32 is 1: a sum rounds to an integer there, and shows it in its lowest bits.
# 127 more, and these are the exponent field of 2**n.
_INTEGERS = np.float32(1.5 * 2 ** 23 + 127)


def _exp_meaning(x: Any) -> Any:
    x = np.minimum(np.maximum(x, np.float32(-87.3)), np.float32(88))
    shifted = fma(x, np.float32(1 / np.log(2)), _INTEGERS)
    n = shifted - _INTEGERS
    r = fma(n, np.float32(-_LN2_LOW), fma(n, np.float32(-_LN2_HIGH), x))
    p = fma(r, np.float32(_EXP[0]), np.float32(_EXP[1]))
    for coefficient in _EXP[2:]:
        p = fma(p, r, np.float32(coefficient))
    return p * (shifted.view(np.int32) << 23).view(np.float32)


def _exp_emit(isa: Isa, x: Value) -> Value:
    """e**x = 2**n * e**r with n = round(x / ln 2), |r| <= ln(2) / 2; error below 2e-7."""
    x = isa.min(isa.max(x, -87.3), 88)      # so that 2**n is a normal number
    shifted = isa.fma(x, 1 / np.log(2), float(_INTEGERS))
    n = shifted - float(_INTEGERS)
    r = isa.fma(n, -_LN2_HIGH, x)           # ln 2 in two pieces: this product is exact
    r = isa.fma(n, -_LN2_LOW, r)
    p = isa.fma(r, _EXP[0], _EXP[1])
    for coefficient in _EXP[2:]:
        p = isa.fma(p, r, coefficient)
    power = x.f.cast("bitcast", shifted, isa.ints, "bits").binary("shl", 23)
    return p * x.f.cast("bitcast", power, isa.floats, "power")


def _any_exp_meaning(x: Any) -> Any:
    half = _exp_meaning(x * np.float32(0.5))
    with np.errstate(over="ignore"):
        return np.where(x == x, half * half, x)


def _any_exp_emit(isa: Isa, x: Value) -> Value:
    """e**x = (e**(x / 2))**2: infinity above 88.72, 0 far below; error below 4e-7."""
    half = _exp_emit(isa, x * 0.5)
    return x.f.select(x.compare("oeq", x), half * half, x)


def _sigmoid_meaning(x: Any) -> Any:
    return np.float32(1) / (np.float32(1) + _exp_meaning(-x))


def _sigmoid_emit(isa: Isa, x: Value) -> Value:
    return 1 / (_exp_emit(isa, x.like(0) - x) + 1)


# tanh x = x p(x**2) / q(x**2) where |x| < 7.905, and 1 to the last bits beyond: the rational approximation of Eigen's
# generic_fast_tanh_float; relative error below 5e-7. It takes half the instructions of one by exp.
_TANH_LIMIT = 7.90531110763549805
_TANH_P = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
           1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)
_TANH_Q = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def _tanh_meaning(x: Any) -> Any:
    x = np.minimum(np.maximum(x, np.float32(-_TANH_LIMIT)), np.float32(_TANH_LIMIT))
    square = x * x
    p, q = (fma(square, np.float32(c[0]), np.float32(c[1])) for c in (_TANH_P, _TANH_Q))
    for coefficient in _TANH_P[2:]:
        p = fma(p, square, np.float32(coefficient))
    for coefficient in _TANH_Q[2:]:
        q = fma(q, square, np.float32(coefficient))
    return x * p / q


def _tanh_emit(isa: Isa, x: Value) -> Value:
    x = isa.min(isa.max(x, -_TANH_LIMIT), _TANH_LIMIT)
    square = x * x
    p, q = (isa.fma(square, c[0], c[1]) for c in (_TANH_P, _TANH_Q))
    for coefficient in _TANH_P[2:]:
        p = isa.fma(p, square, coefficient)
    for coefficient in _TANH_Q[2:]:
        q = isa.fma(q, square, coefficient)
    return x * p / q


# erf by Abramowitz & Stegun 7.1.26 is too coarse (1.5e-7 only in exact arithmetic), so 1 - (polynomial in t)**-16:
# A&S 7.1.28, |error| <= 3e-7.
_ERF = (0.0000430638, 0.0002765672, 0.0001520143, 0.0092705272, 0.0422820123, 0.0705230784, 1.0)


def _erf_meaning(x: Any) -> Any:
    a = np.minimum(np.abs(x), np.float32(4))
    p = fma(a, np.float32(_ERF[0]), np.float32(_ERF[1]))
    for coefficient in _ERF[2:]:
        p = fma(p, a, np.float32(coefficient))
    for _ in range(4):
        p = p * p
    y = np.float32(1) - np.float32(1) / p
    return np.where(x < 0, -y, y)


def _erf_emit(isa: Isa, x: Value) -> Value:
    a = isa.min(isa.unary("fabs", x), 4)
    p = isa.fma(a, _ERF[0], _ERF[1])
    for coefficient in _ERF[2:]:
        p = isa.fma(p, a, coefficient)
    for _ in range(4):
        p = p * p
    y = p.like(1) - 1 / p
    return x.f.select(x.compare("olt", 0), y * -1, y)


@dataclass(frozen=True)
class Gate:
    """x times a step from 0 to 1: x (1/2 + near q(u)), where near is x within [-end, end], u = 2 (near / end)**2 - 1.

    A polynomial and no division. In u the coefficients are small (in x**2 they cancel, and float32 leaves 3e-4).

    They are fitted by Lawson's algorithm for the least largest error of the product under q(1) = 1 / (2 end), so that
    the step is whole beyond the ends.
    """
    end: float
    coefficients: tuple[float, ...]     # of u**0, u**1, ...

    def meaning(self, x: Any) -> Any:
        near = np.minimum(np.maximum(x, np.float32(-self.end)), np.float32(self.end))
        u = fma(near * near, np.float32(2 / self.end ** 2), np.float32(-1))
        return x * fma(near, self._q(fma, u, [np.float32(c) for c in self.coefficients]), np.float32(0.5))

    def emit(self, isa: Isa, x: Value) -> Value:
        near = isa.min(isa.max(x, -self.end), self.end)
        u = isa.fma(near * near, 2 / self.end ** 2, -1)
        return x * isa.fma(near, self._q(isa.fma, u, self.coefficients), 0.5)

    @staticmethod
    def _q(fma: Callable[..., Any], u: Any, coefficients: Sequence[Any]) -> Any:
        """By Estrin's scheme down to three terms: some products more than Horner's, and half as many instructions that
        wait for each other."""
        terms = list(coefficients)
        while len(terms) > 3:
            paired = [fma(u, odd, even) for even, odd in zip(terms[::2], terms[1::2], strict=False)]
            terms = [*paired, *terms[2 * len(paired):]]
            u = u * u
        *lower, result = terms
        for term in lower[::-1]:
            result = fma(u, result, term)
        return result


# x Phi(x): absolute error below 2.2e-6, and below 3.4e-7 |x| beyond 5.
_GELU = Gate(5.0, (1.41363755e-1, -7.02984408e-2, 5.15246131e-2, -4.03866395e-2, 3.13650481e-2, -2.36618873e-2,
                   1.68802664e-2, -1.00634592e-2, 5.1558041e-3, -4.0079765e-3, 3.17372917e-3, -1.04481308e-3))
# For results that are stored in a byte: errors below a sixteenth (SiLU: a tenth) of its unit, max(|x|, 1/2) / 255.
_GELU_U8 = Gate(3.5, (0.199394137, -0.0900131911, 0.0522459298, -0.0313684456, 0.0188512858, -0.00625257567))
_GELU_TANH_U8 = Gate(3.5, (0.199472502, -0.0900409818, 0.0518385731, -0.030816989, 0.0191690773, -0.00676503219))
_SILU_U8 = Gate(8.0, (0.087807022, -0.042114418, 0.0274583641, -0.0215534791, 0.0297212992, -0.0169348195,
                      -0.02430957, 0.00919075869, 0.0352444313, -0.0220095832))


# log x: x = 2**n * m with m in [sqrt(1/2), sqrt(2)); Cephes' logf.
_LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)


def _log_meaning(x: Any) -> Any:
    bits = np.ascontiguousarray(np.maximum(x, np.float32(1.17549435e-38)), np.float32).view(np.int32)
    n = ((bits - 0x3F3504F3) >> 23).astype(np.int32)
    m = (bits - (n << 23)).view(np.float32) - np.float32(1)
    p = fma(m, np.float32(_LOG[0]), np.float32(_LOG[1]))
    for coefficient in _LOG[2:]:
        p = fma(p, m, np.float32(coefficient))
    y = fma(m * m, np.float32(-0.5), p * m * (m * m))
    turns = n.astype(np.float32)
    y = fma(turns, np.float32(_LN2_LOW), y)
    return fma(turns, np.float32(_LN2_HIGH), m + y)


def _log_emit(isa: Isa, x: Value) -> Value:
    f = x.f
    bits = f.cast("bitcast", isa.max(x, 1.17549435e-38), isa.ints, "bits")
    n = (bits - 0x3F3504F3).binary("ashr", 23)
    m = f.cast("bitcast", bits - n.binary("shl", 23), isa.floats, "mantissa") - 1
    p = isa.fma(m, _LOG[0], _LOG[1])
    for coefficient in _LOG[2:]:
        p = isa.fma(p, m, coefficient)
    y = isa.fma(m * m, -0.5, p * m * (m * m))
    turns = isa.to_float(n)
    y = isa.fma(turns, _LN2_LOW, y)
    return isa.fma(turns, _LN2_HIGH, m + y)


def _any_log_meaning(x: Any) -> Any:
    y = _log_meaning(x)
    y = np.where(x == 0, np.float32(-np.inf), y)
    y = np.where(x == np.inf, np.float32(np.inf), y)
    return np.where(x >= 0, y, np.float32(np.nan))


def _any_log_emit(isa: Isa, x: Value) -> Value:
    f, y = x.f, _log_emit(isa, x)
    y = f.select(x.compare("oeq", 0), x.like(-np.inf), y)       # what masks are made by
    y = f.select(x.compare("oeq", np.inf), x.like(np.inf), y)
    return f.select(x.compare("oge", 0), y, x.like(np.nan))


# sin x: x = n pi / 2 + r with |r| <= pi / 4; n's last two bits say whether it is the sine or the cosine of r, and with
# which sign (cos x = sin(x + pi / 2): n + 1). pi / 2 in three pieces, of which the products with n are exact under fma;
# Cephes' sinf and cosf. Absolute error below 2e-7 up to |x| = 2**16; beyond, n pi / 2 takes ever more of r's bits.
_HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100059307e-15)
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_TURNS = np.float32(1.5 * 2 ** 23)      # near it the last bit of a float32 is 1


def _sine_meaning(quarters: int) -> Callable[..., Any]:
    def meaning(x: Any) -> Any:
        shifted = fma(x, np.float32(2 / np.pi), _TURNS)
        n, r = shifted - _TURNS, x
        for part in _HALF_PI:
            r = fma(n, np.float32(-part), r)
        square = r * r
        s, c = (fma(square, np.float32(p[0]), np.float32(p[1])) for p in (_SINE, _COSINE))
        s, c = (fma(square, q, np.float32(p[2])) for q, p in ((s, _SINE), (c, _COSINE)))
        sine = fma(square * r, s, r)
        cosine = fma(square * square, c, fma(square, np.float32(-0.5), np.float32(1)))
        turn = np.ascontiguousarray(shifted).view(np.int32) + quarters
        y = np.where(turn & 1, cosine, sine)
        return np.where(turn & 2, -y, y)
    return meaning


def _sine_emit(quarters: int) -> Callable[..., Value]:
    def emit(isa: Isa, x: Value) -> Value:
        f = x.f
        shifted = isa.fma(x, 2 / np.pi, float(_TURNS))
        n, r = shifted - float(_TURNS), x
        for part in _HALF_PI:
            r = isa.fma(n, -part, r)
        square = r * r
        s, c = (isa.fma(square, p[0], p[1]) for p in (_SINE, _COSINE))
        s, c = isa.fma(square, s, _SINE[2]), isa.fma(square, c, _COSINE[2])
        sine = isa.fma(square * r, s, r)
        cosine = isa.fma(square * square, c, isa.fma(square, -0.5, 1))
        turn = f.cast("bitcast", shifted, isa.ints, "turn") + quarters
        y = f.select(turn.binary("and", 1).compare("ne", 0), cosine, sine)
        return f.select(turn.binary("and", 2).compare("ne", 0), y * -1, y)
    return emit


FUNCTIONS: dict[str, Meaning] = {       # each a dozen machine instructions, which wait for each other
    "exp": Meaning(_any_exp_meaning, _any_exp_emit),
    "exp_of_moderate": Meaning(_exp_meaning, _exp_emit),        # from -87 to 88
    "log": Meaning(_any_log_meaning, _any_log_emit),
    "log_of_positive": Meaning(_log_meaning, _log_emit),
    "sigmoid": Meaning(_sigmoid_meaning, _sigmoid_emit),
    "tanh": Meaning(_tanh_meaning, _tanh_emit),
    "erf": Meaning(_erf_meaning, _erf_emit),
    "gelu": Meaning(_GELU.meaning, _GELU.emit),
    "gelu_u8": Meaning(_GELU_U8.meaning, _GELU_U8.emit),
    "gelu_tanh_u8": Meaning(_GELU_TANH_U8.meaning, _GELU_TANH_U8.emit),
    "silu_u8": Meaning(_SILU_U8.meaning, _SILU_U8.emit),
    "sin": Meaning(_sine_meaning(0), _sine_emit(0)),
    "cos": Meaning(_sine_meaning(1), _sine_emit(1)),
}
