"""Conditions on extents under which a symbolic plan holds, as text."""
from __future__ import annotations

from infer_server.engines.ir.polynomials import Polynomial
from infer_server.engines.ir.symbolic import Guard, ShapeEnv, text
from infer_server.engines.plan.symbolic.plans import SymbolicPlan


def conditions(symbolic: SymbolicPlan) -> list[str]:
    """Return the conditions under which a symbolic plan holds: "50 <= T <= 128", "T == P + S".

    The bounds of each extent come first.
    """
    lower = dict.fromkeys(symbolic.names, 1)
    upper: dict[str, int] = {}
    others: list[str] = []
    unequal: list[tuple[str, int]] = []
    for guard, holds in symbolic.env.guards.items():
        bound = _bound(symbolic.env, guard, holds)
        if bound is None:
            others.append(_comparison(symbolic.env, guard, holds))
            continue
        name, least, most = bound
        if guard[0] == "==" and not holds and least is not None:
            unequal.append((name, least))
            continue
        if least is not None:
            lower[name] = max(lower[name], least)
        if most is not None:
            upper[name] = min(upper.get(name, most), most)
    bounds = [_between(name, lower[name], upper.get(name)) for name in symbolic.names]
    bounds += [f"{name} != {number}" for name, number in unequal
               if lower[name] <= number <= upper.get(name, number)]
    fixed = [f"{name} == {value}" for name, value in symbolic.fixed.items()]
    return [*fixed, *bounds, *dict.fromkeys(others)]


def _between(name: str, least: int, most: int | None) -> str:
    if least == most:
        return f"{name} == {least}"
    return f"{name} >= {least}" if most is None else f"{least} <= {name} <= {most}"


def _bound(env: ShapeEnv, guard: Guard, holds: bool) -> tuple[str, int | None, int | None] | None:
    """Return the extent that a guard bounds alone, and its least and largest number; None for other guards.

    Of an inequality, both are the number that is excluded.
    """
    relation, polynomial = guard
    terms = dict(polynomial)
    constant = terms.pop((), 0)
    ((monomial, factor),) = terms.items() if len(terms) == 1 else [((), 0)]
    name = env.atoms[monomial[0]] if len(monomial) == 1 else None
    if not isinstance(name, str):
        return None
    if relation == "==":
        return name, -constant // factor, -constant // factor
    if not holds:       # factor * name + constant >= 0, as -factor * name - constant - 1 < 0
        factor, constant = -factor, -constant - 1
    # factor * name < -constant
    return (name, None, (-constant - 1) // factor) if factor > 0 else (name, constant // -factor + 1, None)


def _comparison(env: ShapeEnv, guard: Guard, holds: bool) -> str:
    relation, polynomial = guard
    left, right = (_positive(polynomial, sign) for sign in (1, -1))
    word = relation if holds else {"==": "!=", "<": ">="}[relation]
    return f"{text(left, env.atoms)} {word} {text(right, env.atoms)}"


def _positive(polynomial: Polynomial, sign: int) -> Polynomial:
    """Return the terms of one sign, with positive coefficients."""
    return tuple((monomial, sign * factor) for monomial, factor in polynomial if sign * factor > 0)
