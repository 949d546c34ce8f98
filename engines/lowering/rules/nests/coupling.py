"""Rule for pairwise coupling: class probabilities from those of pairs, by unrolled sweeps in registers.

Rows that have converged stay unchanged.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.nest.program import KINDS, Term
from infer_server.engines.ops.coupling import ERROR

MOST_CLASSES = 5        # the unrolled code grows with their cube
SWEEPS = 6              # 360,000 random rows of up to MOST_CLASSES classes converged after four


@fallback_rule("PairwiseCoupling")
def lower_coupling(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    pairs = ctx.type(node.inputs[0])
    classes = range(int(pairs.shape[1]))
    if len(classes) > MOST_CLASSES:
        raise Refused(f"{len(classes)} classes; {MOST_CLASSES} are the most")
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    row, own = w.axes
    labels = [w.constant(one, "i64") for one in classes]
    r = [[w.at(node.inputs[0], [row, i, j]) for j in labels] for i in labels]
    gradient = [[_sum([r[k][i] * r[k][i] for k in classes if k != i]) if i == j else -(r[j][i] * r[i][j])
                 for j in classes] for i in classes]
    p = [w.constant(1 / len(classes), KINDS[pairs.dtype.name])] * len(classes)
    for _ in range(SWEEPS):
        slope = [_sum([gradient[i][j] * p[j] for j in classes]) for i in classes]
        whole = _sum([p[i] * slope[i] for i in classes])
        error = reduce(Term.at_least, [(one - whole).at_least(whole - one) for one in slope])
        moves = error >= ERROR / len(classes)       # false for NaN
        p = [w.where(moves, new, old) for old, new in zip(p, _swept(gradient, p, slope, whole), strict=True)]
    value = p[0]
    for label, one in zip(labels[1:], p[1:], strict=True):
        value = w.where(own.equals(label), one, value)
    return [w.call(value)]


def _swept(gradient: list[list[Term]], p: list[Term], slope: list[Term], whole: Term) -> list[Term]:
    """Do one sweep of infer_server.engines.ops.coupling."""
    for one in range(len(p)):
        step = (whole - slope[one]) / gradient[one][one]
        scale = step + 1
        whole = (whole + step * (step * gradient[one][one] + slope[one] * 2)) / (scale * scale)
        slope = [(old + step * of_one) / scale for old, of_one in zip(slope, gradient[one], strict=True)]
        p = [(old + step if i == one else old) / scale for i, old in enumerate(p)]
    return p


def _sum(terms: list[Term]) -> Term:
    return reduce(add, terms)
