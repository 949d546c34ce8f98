"""Forests of decision trees, which go a step at a time from their roots to their leaves, some trees at once: each step
waits for what it reads, and those of other trees fill the time."""
from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import numpy as np

from engines.ir.graph import Array, Node
from engines.lowering.calls.calls import Call, Context, Refused, lowers_in_general
from engines.lowering.calls.nesting import NestWriter
from engines.lowering.nest.program import KINDS, Linear, Term
from engines.ops.trees import COLUMN, FLAGS, LEFT, LEFT_IF_EQUAL, LEFT_IF_MISSING, RIGHT, THRESHOLD, threshold_type

DEEPEST = 64        # steps, each written out ...
WRITTEN = 256       # ... for so many trees at once that there are about as many of them in all
AT_ONCE = 16        # trees, at most
_REDUCTIONS = {"SUM": "sum", "AVERAGE": "sum", "MIN": "min", "MAX": "max"}
_TOGETHER = {"SUM": add, "AVERAGE": add, "MIN": Term.at_most, "MAX": Term.at_least}


@lowers_in_general("Forest")
def lower_forest(ctx: Context, node: Node) -> Sequence[Call]:
    """A leaf's children are the leaf itself, so that all trees take as many steps."""
    *_, roots, weights = node.inputs
    count, depth, aggregate = len(ctx.constant(roots)), int(node.attrs["depth"]), node.attrs["aggregate"]
    if depth > DEEPEST:
        raise Refused(f"a tree of {depth} steps; {DEEPEST} are the most")
    together = max(min(AT_ONCE, count, WRITTEN // max(depth, 1)), 1)
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape, (-(-count // together),))
    row, target = w.axes
    trees = [w.along(Linear(first, ((len(w.loops), together),))) for first in range(together)]
    places = [w.at(roots, [tree.at_most(count - 1) if count % together else tree]).to("i64") for tree in trees]
    flags = np.unique(ctx.constant(node.inputs[1])[:, COLUMN] & (1 << FLAGS) - 1)
    for _ in range(depth):
        places = [_step(w, node, row, place, flags) for place in places]
    values = [w.at(weights, [place, target]) for place in places]
    if count % together and _REDUCTIONS[aggregate] == "sum":        # the last tree counts once
        values = [w.where(tree < count, value, 0) for tree, value in zip(trees, values, strict=True)]
    value = w.reduce(_REDUCTIONS[aggregate], reduce(_TOGETHER[aggregate], values))
    return [w.call(value * (1 / count) if aggregate == "AVERAGE" else value)]


def _step(w: NestWriter, node: Node, row: Term, place: Term, known: Array) -> Term:
    """From each node to one of its children. known: the flags that nodes have; what all or none say is not asked of
    each."""
    x, nodes, *_ = node.inputs
    flagged, bits, right, left = (w.at(nodes, [place, w.constant(field, "i64")])
                                 for field in (COLUMN, THRESHOLD, RIGHT, LEFT))
    said = int(np.bitwise_or.reduce(known, initial=0))
    value = w.at(x, [row, flagged.binary("shr", FLAGS).to("i64")])
    threshold = bits.bits(KINDS[threshold_type(w.ctx.type(nodes).dtype).name])
    if value.kind != threshold.kind:
        value, threshold = value.to("f64"), threshold.to("f64")
    goes_left = value <= threshold
    flag = flagged if len(known) > 1 else None
    if said & LEFT_IF_EQUAL:
        equal = value.equals(threshold)
        goes_left = w.where(_has(flag, LEFT_IF_EQUAL), equal, goes_left) if flag else equal
    if said & LEFT_IF_MISSING:
        missing = value.differs(value)
        goes_left = goes_left | (missing & _has(flag, LEFT_IF_MISSING) if flag else missing)
    return w.where(goes_left, left, right).to("i64")


def _has(flagged: Term, bit: int) -> Term:
    return flagged.binary("and", bit).differs(0)
