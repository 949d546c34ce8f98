"""Elementary functions in float64 for nests, by bit manipulation and polynomials.

Float32 functions of fast kernels are in epilogue/functions.py. Rarer float32 functions are computed here in float64.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from infer_server.engines.lowering.nest.program import Term

_LN2 = (0.6931471803691238, 1.9082149292705877e-10)         # in two parts: the products with exponents are exact
_HALF_PI = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
_EXP = tuple(1 / math.factorial(n) for n in range(13, -1, -1))
_LOG = tuple(2 / n for n in range(23, 0, -2))               # in ((m - 1) / (m + 1))**2 <= 0.0295
_LOG1P = tuple(2 / n for n in range(33, 0, -2))             # in squares up to 1/9
_SINE = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(8, -1, -1))
_COSINE = tuple((-1) ** n / math.factorial(2 * n) for n in range(8, -1, -1))
_ATAN = tuple((-1) ** n / (2 * n + 1) for n in range(12, -1, -1))   # in squares up to 0.04


def polynomial(x: Term, coefficients: Sequence[float]) -> Term:
    """Evaluate a polynomial by Horner's scheme, highest power first."""
    result = x.like(coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def exp(x: Term) -> Term:
    """Return e**x = 2**n * e**r with n = round(x / ln 2); 0 below -708, infinity above 709.78."""
    near = x.at_least(-708.0).at_most(709.8)
    n = (near * (1 / math.log(2))).unary("rint")
    r = near - n * _LN2[0] - n * _LN2[1]
    y = polynomial(r, _EXP) * _power_of_two(n - 1) * 2.0
    y = x.writer.where(x < -708.0, 0.0, x.writer.where(x > 709.782712893384, math.inf, y))
    return x.writer.where(x.equals(x), y, x)


def _power_of_two(n: Term) -> Term:
    return ((n.to("i64") + 1023) * (1 << 52)).bits("f64")


def log(x: Term) -> Term:
    """Return log x with x = 2**n * m, m in [sqrt(1/2), sqrt(2)); -inf for 0, NaN for negative x."""
    w = x.writer
    bits = x.bits("i64")
    high = (bits.binary("and", (1 << 52) - 1) + (1023 << 52)).bits("f64")
    n = bits.binary("shr", 52) - 1023
    large = high > math.sqrt(2)
    m = w.where(large, high * 0.5, high)
    turns = w.where(large, n + 1, n).to("f64")
    s = (m - 1.0) / (m + 1.0)
    y = turns * _LN2[0] + (s * polynomial(s * s, _LOG) + turns * _LN2[1])
    y = w.where(x.equals(math.inf), math.inf, w.where(x.equals(0.0), -math.inf, y))
    return w.where(x >= 0.0, y, math.nan)


def log1p(x: Term) -> Term:
    """Return log(1 + x) for x in [0, 1] as 2 artanh(x / (2 + x))."""
    s = x / (x + 2.0)
    return s * polynomial(s * s, _LOG1P)


def _sine(x: Term, quarters: int) -> Term:
    """Return sin(x + quarters * pi / 2)."""
    w = x.writer
    n = (x * (2 / math.pi)).unary("rint")
    r = x
    for part in _HALF_PI:
        r = r - n * part
    square = r * r
    turn = n.to("i64") + quarters
    y = w.where(turn.binary("and", 1).differs(0), polynomial(square, _COSINE), r * polynomial(square, _SINE))
    return w.where(turn.binary("and", 2).differs(0), -y, y)


def sin(x: Term) -> Term:
    return _sine(x, 0)


def cos(x: Term) -> Term:
    return _sine(x, 1)


def tan(x: Term) -> Term:
    return sin(x) / cos(x)


def atan(x: Term) -> Term:
    """Return atan x: pi / 2 - atan(1 / x) above 1, then atan x = 2 atan(x / (1 + sqrt(1 + x**2))) twice."""
    w = x.writer
    size = x.unary("abs")
    beyond = size > 1.0
    t = w.where(beyond, x.like(1.0) / size, size)
    for _ in range(2):
        t = t / ((t * t + 1.0).unary("sqrt") + 1.0)
    y = t * polynomial(t * t, _ATAN) * 4.0
    y = w.where(beyond, x.like(math.pi / 2) - y, y)
    return w.where(x < 0.0, -y, y)


def asin(x: Term) -> Term:
    return atan(x / (x.like(1.0) - x * x).unary("sqrt"))


def acos(x: Term) -> Term:
    return x.like(math.pi / 2) - asin(x)


def sinh(x: Term) -> Term:
    return (exp(x) - exp(-x)) * 0.5


def cosh(x: Term) -> Term:
    return (exp(x) + exp(-x)) * 0.5


def tanh(x: Term) -> Term:
    return x.like(1.0) - x.like(2.0) / (exp(x * 2.0) + 1.0)


def asinh(x: Term) -> Term:
    size = x.unary("abs")
    y = log(size + (size * size + 1.0).unary("sqrt"))
    return x.writer.where(x < 0.0, -y, y)


def acosh(x: Term) -> Term:
    return log(x + (x * x - 1.0).unary("sqrt"))


def atanh(x: Term) -> Term:
    return log((x + 1.0) / (x.like(1.0) - x)) * 0.5


def sigmoid(x: Term) -> Term:
    return x.like(1.0) / (exp(-x) + 1.0)


def truncated(x: Term) -> Term:
    return x.writer.where(x < 0.0, x.unary("ceil"), x.unary("floor"))


def power(x: Term, y: Term) -> Term:
    """Return x**y as C's pow: 1 for y = 0, NaN for negative x and non-integral y."""
    w = x.writer
    size = exp(y * log(x.unary("abs")))
    whole = y.equals(y.unary("floor"))
    half = y * 0.5
    signed = w.where(whole & half.differs(half.unary("floor")), -size, size)
    result = w.where(x < 0.0, w.where(whole, signed, math.nan), size)
    result = w.where(x.equals(0.0), w.where(y < 0.0, y.like(math.inf), 0.0), result)
    return w.where(y.equals(0.0), 1.0, result)


def remainder(a: Term, b: Term) -> Term:
    """Return the remainder with the sign of a, as C's fmod; exact for float32 numbers with a quotient below 2**29."""
    w, size = a.writer, b.unary("abs")
    x = a.unary("abs")
    rest = x - (x / size).unary("floor") * size
    rest = w.where(rest < 0.0, rest + size, rest)
    rest = w.where(rest >= size, rest - size, rest)
    rest = w.where(size.equals(math.inf) & (x < math.inf), x, rest)
    return w.where(a < 0.0, -rest, rest)


def modulo(a: Term, b: Term) -> Term:
    """Return the remainder with the sign of b."""
    rest = remainder(a, b)
    opposed = rest.differs(0.0) & (rest < 0.0).differs(b < 0.0)
    return a.writer.where(opposed, rest + b, rest)
