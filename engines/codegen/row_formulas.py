"""Softmax, norms and local response normalisation as passes over a row, whoever goes over it.

The equations stand in engines/lowering/problems/rows.py; a backend's Row knows how elements are found, reduced, stored.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from engines.codegen.ir_builder import Value
from engines.codegen.words import Words
from engines.lowering.problems.rows import EXP, EXP_DOWN_TO_0, ROOTS, Lrn, Norm, log_of_positive

Body = Callable[[Any], Value]       # of a place in the row, of the backend's own kind


class Row(Protocol):
    def x(self, at: Any) -> Value:
        """The element, by way of the prologue."""

    def reduce(self, kind: str, body: Body) -> Value:
        """The sum, max or min of body over the row."""

    def store(self, body: Body) -> None:
        """y = program(body), over the row."""


def share(peak: Value, total: Value) -> Value:
    """What the exponentials of a row are multiplied by: 1 / their sum, or 0 where there was nothing to see.

    Of NaN the sum is NaN in every lane, and so is 0 times it; the peak is in some, for a maximum may pass over it.
    """
    return peak.f.select(seen(peak), 1 / total, total * 0, "share")


def taken_off(peak: Value) -> Value:
    """What a row is lowered by: its peak, or 0 where there is nothing to see: -inf - -inf is no number."""
    return peak.f.select(seen(peak), peak, peak.like(0), "top")


def seen(peak: Value) -> Value:
    """Whether there is anything to see in a row."""
    return peak.compare("ogt", -math.inf)


def softmax(row: Row, words: Words, log: bool, keep: Callable[[Value, Any], Value] | None = None,
            kept: Body | None = None) -> None:
    """keep: remembers an exponential on its way to the sum, and `kept` has it again; without, it is computed twice."""
    peak = row.reduce("max", row.x)
    top = taken_off(peak)

    def exponential(at: Any) -> Value:
        value: Value = EXP_DOWN_TO_0(words, row.x(at) - top)
        return value

    total = row.reduce("sum", exponential if keep is None else lambda at: keep(exponential(at), at))
    if log:
        logarithm: Value = log_of_positive(words, total)
        row.store(lambda at: row.x(at) - top - logarithm)
        return
    scale, again = share(peak, total), kept or exponential
    row.store(lambda at: again(at) * scale)


def norm(row: Row, words: Words, problem: Norm) -> None:
    kind, part = problem.kind, 1 / problem.width
    centre = row.reduce("sum", row.x) * part if kind == "layer" else None

    def centred(at: Any) -> Value:
        value = row.x(at)
        return value if centre is None else value - centre

    def square(at: Any) -> Value:
        value = centred(at)
        return value * value

    total = row.reduce("sum", square)
    if kind == "l2":
        scale = 1 / words.max(total.like(problem.epsilon), words.unary("sqrt", total))
    else:
        scale = 1 / words.unary("sqrt", total * part + problem.epsilon)
    row.store(lambda at: centred(at) * scale)


def response(words: Words, lrn: Lrn, x: Callable[[], Value], total: Value) -> Value:
    """x normalised, of the sum of its neighbours' squares."""
    base = total * (lrn.alpha / lrn.size) + lrn.bias
    if lrn.beta in ROOTS:
        power: Value = ROOTS[lrn.beta](base, lambda value: words.unary("sqrt", value))
        return x() / power
    result: Value = x() * EXP(words, log_of_positive(words, base) * -lrn.beta)
    return result
