"""Tests of polynomials in canonical form."""
from __future__ import annotations

import itertools

from infer_server.engines.ir.polynomials import Polynomial, atom, constant, least, plus, product, quotient, reduced

N, M = atom(0), atom(1)


def value(polynomial: Polynomial, n: int, m: int = 1) -> int:
    return sum(factor * n ** monomial.count(0) * m ** monomial.count(1) for monomial, factor in polynomial)


def test_equal_polynomials_are_equal_values() -> None:
    square = product(plus(N, M), plus(N, M))
    assert square == plus(plus(product(N, N), product(M, M)), product(N, M), 2)
    assert plus(square, square, -1) == ()


def test_a_smaller_polynomial_is_negative_or_zero_just_where_the_larger_is() -> None:
    for factor, rest, n in itertools.product((1, 2, 3, 8), range(-20, 20), range(-9, 9)):
        polynomial = plus(product(N, constant(factor)), constant(rest))
        less, equal = reduced("<", polynomial), reduced("==", polynomial)
        assert less is not None and (value(less, n) < 0) == (factor * n + rest < 0)
        assert (equal is not None and value(equal, n) == 0) == (factor * n + rest == 0)


def test_what_is_left_of_a_quotient_has_nothing_that_divides() -> None:
    whole, rest = quotient(plus(plus(product(N, constant(12)), product(M, constant(7))), constant(-5)), constant(4))
    assert whole == plus(plus(product(N, constant(3)), M), constant(-2))
    assert rest == plus(product(M, constant(3)), constant(3))
    assert quotient(plus(product(N, M), product(N, constant(3))), N) == (plus(M, constant(3)), ())
    assert quotient(product(plus(N, M), constant(6)), plus(N, M)) == (constant(6), ())
    assert quotient(N, plus(N, M)) == ((), N)


def test_a_bound_is_known_where_no_term_is_taken_off() -> None:
    assert least(plus(product(N, M), constant(-3)), [2, 5]) == 7
    assert least(plus(N, M, -1), [2, 5]) is None
    assert least(N, [None]) is None
