"""Probabilities of classes out of those of their pairs, written out sweep by sweep: all that a row needs is in
registers, and what has come to rest stays as it is."""
from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

from engines.ir.graph import Node
from engines.lowering.calls.calls import Call, Context, Refused, lowers_in_general
from engines.lowering.calls.nesting import NestWriter
from engines.lowering.nest.program import KINDS, Term
from engines.ops.coupling import ERROR

MOST_CLASSES = 5        # what is written out for a row, once for each of its classes, grows with their cube
SWEEPS = 6              # rows of so few classes are at rest after four (of 360,000 that were drawn)


@lowers_in_general("PairwiseCoupling")
def lower_coupling(ctx: Context, node: Node) -> Sequence[Call]:
    pairs = ctx.type(node.inputs[0])
    classes = range(int(pairs.shape[1]))
    if len(classes) > MOST_CLASSES:
        raise Refused(f"{len(classes)} classes; {MOST_CLASSES} are the most")
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    row, own = w.axes
    places = [w.constant(one, "i64") for one in classes]
    r = [[w.at(node.inputs[0], [row, i, j]) for j in places] for i in places]
    gradient = [[_sum([r[k][i] * r[k][i] for k in classes if k != i]) if i == j else -(r[j][i] * r[i][j])
                 for j in classes] for i in classes]
    p = [w.constant(1 / len(classes), KINDS[pairs.dtype.name])] * len(classes)
    for _ in range(SWEEPS):
        slope = [_sum([gradient[i][j] * p[j] for j in classes]) for i in classes]
        whole = _sum([p[i] * slope[i] for i in classes])
        error = reduce(Term.at_least, [(one - whole).at_least(whole - one) for one in slope])
        moves = error >= ERROR / len(classes)       # not where it is no number
        p = [w.where(moves, new, old) for old, new in zip(p, _swept(gradient, p, slope, whole), strict=True)]
    value = p[0]
    for place, one in zip(places[1:], p[1:], strict=True):
        value = w.where(own.equals(place), one, value)
    return [w.call(value)]


def _swept(gradient: list[list[Term]], p: list[Term], slope: list[Term], whole: Term) -> list[Term]:
    """See engines.ops.coupling."""
    for one in range(len(p)):
        step = (whole - slope[one]) / gradient[one][one]
        scale = step + 1
        whole = (whole + step * (step * gradient[one][one] + slope[one] * 2)) / (scale * scale)
        slope = [(old + step * of_one) / scale for old, of_one in zip(slope, gradient[one], strict=True)]
        p = [(old + step if i == one else old) / scale for i, old in enumerate(p)]
    return p


def _sum(terms: list[Term]) -> Term:
    return reduce(add, terms)
