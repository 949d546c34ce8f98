"""Softmax, normalisations and local response normalisation, written as passes over a row.

engines/lowering/problems/rows.py has the equations. A backend implements RowPasses, which loads, reduces and stores
elements.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.words import Primitives
from infer_server.engines.lowering.problems.rows import EXP, EXP_DOWN_TO_0, ROOTS, Lrn, Norm, log_of_positive

Body = Callable[[Any], Value]       # position in the row, of the backend's own type, -> value


class RowPasses(Protocol):
    """A row of elements that a backend can load, reduce and store."""
    def x(self, at: Any) -> Value:
        """Load the element at a position, after the prologue."""

    def reduce(self, kind: str, body: Body) -> Value:
        """Return the sum, max or min of body over the row."""

    def store(self, body: Body) -> None:
        """Store y = program(body) at each position of the row."""


def softmax_scale(peak: Value, total: Value) -> Value:
    """Return the factor for the exponentials of a row: 1 / their sum, or 0 if every element is -inf.

    A row with NaN gives NaN either way: its sum is NaN in every lane, and so is 0 * sum. The peak may be a number then,
    because max may skip NaN.
    """
    return peak.f.select(is_unmasked(peak), 1 / total, total * 0, "share")


def softmax_shift(peak: Value) -> Value:
    """Return the value subtracted from a row before exp: its peak, or 0 if the peak is -inf (-inf - -inf is NaN)."""
    return peak.f.select(is_unmasked(peak), peak, peak.like(0), "top")


def is_unmasked(peak: Value) -> Value:
    """Return an i1 that is true if the peak of a row is above -inf."""
    return peak.compare("ogt", -math.inf)


def softmax(row: RowPasses, machine: Primitives, log: bool, save: Callable[[Value, Any], Value] | None = None,
            load: Body | None = None) -> None:
    """Emit softmax (or log-softmax if `log`) of a row.

    save stores an exponential while the sum is computed, and `load` loads it again; without them each exponential is
    computed twice.
    """
    peak = row.reduce("max", row.x)
    top = softmax_shift(peak)

    def exponential(at: Any) -> Value:
        value: Value = EXP_DOWN_TO_0(machine, row.x(at) - top)
        return value

    total = row.reduce("sum", exponential if save is None else lambda at: save(exponential(at), at))
    if log:
        logarithm: Value = log_of_positive(machine, total)
        row.store(lambda at: row.x(at) - top - logarithm)
        return
    scale, again = softmax_scale(peak, total), load or exponential
    row.store(lambda at: again(at) * scale)


def norm(row: RowPasses, machine: Primitives, problem: Norm) -> None:
    """Emit the normalisation of a row: layer norm, RMS norm or L2 norm."""
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
        scale = 1 / machine.max(total.like(problem.epsilon), machine.unary("sqrt", total))
    else:
        scale = 1 / machine.unary("sqrt", total * part + problem.epsilon)
    row.store(lambda at: centred(at) * scale)


def response(machine: Primitives, lrn: Lrn, x: Callable[[], Value], total: Value) -> Value:
    """Return x after local response normalisation, given `total`, the sum of the squares of its neighbours."""
    base = total * (lrn.alpha / lrn.size) + lrn.bias
    if lrn.beta in ROOTS:
        power: Value = ROOTS[lrn.beta](base, lambda value: machine.unary("sqrt", value))
        return x() / power
    result: Value = x() * EXP(machine, log_of_positive(machine, base) * -lrn.beta)
    return result
