"""Polynomials with integer coefficients in canonical form: equal polynomials are equal values.

A monomial is the sorted tuple of its atoms, () for the constant; a polynomial is the sorted tuple of (monomial,
coefficient) without zero coefficients. Atoms are numbers of open extents or irreducible quotients, known to their
owner.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Monomial = tuple[int, ...]
Polynomial = tuple[tuple[Monomial, int], ...]

ZERO: Polynomial = ()


def constant(number: int) -> Polynomial:
    return (((), number),) if number else ZERO


def atom(index: int) -> Polynomial:
    return (((index,), 1),)


def number_of(p: Polynomial) -> int | None:
    """Return the constant that the polynomial is, or None if it has atoms."""
    if not p:
        return 0
    return p[0][1] if len(p) == 1 and not p[0][0] else None


def plus(p: Polynomial, q: Polynomial, times: int = 1) -> Polynomial:
    """Return p + times * q."""
    sums = dict(p)
    for monomial, coefficient in q:
        sums[monomial] = sums.get(monomial, 0) + times * coefficient
    return _canonical(sums)


def product(p: Polynomial, q: Polynomial) -> Polynomial:
    sums: dict[Monomial, int] = {}
    for a, m in p:
        for b, n in q:
            both = tuple(sorted(a + b))
            sums[both] = sums.get(both, 0) + m * n
    return _canonical(sums)


def quotient(p: Polynomial, q: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Return (a, r) with p = a * q + r.

    For a q of one term, r has no term that it divides; a q of several terms divides all of p or nothing.
    """
    if len(q) != 1:
        factor = _ratio(p, q)
        return (constant(factor), ZERO) if factor is not None else (ZERO, p)
    (divisor, by), = q
    whole: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, coefficient in p:
        left = _without(monomial, divisor)
        if left is None:
            rest[monomial] = coefficient
        else:
            whole[left], rest[monomial] = divmod(coefficient, by)
    return _canonical(whole), _canonical(rest)


def value(p: Polynomial, atoms: Sequence[Any]) -> Any:
    """Return the number of a polynomial for the numbers of its atoms."""
    return sum(coefficient * math.prod(atoms[index] for index in monomial) for monomial, coefficient in p)


def least(p: Polynomial, bounds: Sequence[int | None]) -> int | None:
    """Return a lower bound from lower bounds of the atoms, or None if there is none."""
    found = 0
    for monomial, coefficient in p:
        term = coefficient
        for index in monomial:
            bound = bounds[index]
            if bound is None or bound < 0 or coefficient < 0:
                return None
            term *= bound
        found += term
    return found


def reduced(relation: str, p: Polynomial) -> Polynomial | None:
    """Return the simplest polynomial with the same relation ("<" or "==") to 0, or None if it never holds."""
    factor = math.gcd(*(coefficient for monomial, coefficient in p if monomial))
    rest = dict(p).get((), 0)
    if relation == "==" and rest % factor:
        return None
    # For integer n, factor * n + rest < 0 iff n + floor(rest / factor) < 0.
    return _canonical({**{m: c // factor for m, c in p if m}, (): rest // factor})


def _ratio(p: Polynomial, q: Polynomial) -> int | None:
    """Return the integer p / q, or None."""
    if len(p) != len(q) or not p or p[0][1] % q[0][1]:
        return None
    factor = p[0][1] // q[0][1]
    return factor if p == tuple((monomial, factor * coefficient) for monomial, coefficient in q) else None


def _without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    left = list(monomial)
    for index in divisor:
        if index not in left:
            return None
        left.remove(index)
    return tuple(left)


def _canonical(sums: dict[Monomial, int]) -> Polynomial:
    return tuple(sorted(item for item in sums.items() if item[1]))
