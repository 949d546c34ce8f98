"""General rule for forests of decision trees, walked several at a time to hide the latency of their loads.

Balanced trees are unrolled to the depth of the deepest leaf; a step at a leaf stays there. If most rows are likely to
reach leaves earlier, as in trees grown leaf by leaf, a loop ends as soon as all trees of a group are at leaves.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import numpy as np

from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.nest.program import KINDS, Linear, Term
from infer_server.engines.ops.trees import (
    COLUMN,
    FLAGS,
    LEFT,
    LEFT_IF_EQUAL,
    LEFT_IF_MISSING,
    RIGHT,
    THRESHOLD,
    threshold_type,
)

DEEPEST = 64        # most unrolled steps
WRITTEN = 256       # unrolled steps of all trees of a group, about
AT_ONCE = 16        # most trees per group ...
IN_LOOP = 8         # ... and in a loop, where each has its place in a register
UNROLLED = 3        # expected steps per step that is unrolled before the loop
TEST = 1.25         # time of a step with the test for leaves, in steps
_REDUCTIONS = {"SUM": "sum", "AVERAGE": "sum", "MIN": "min", "MAX": "max"}
_TOGETHER = {"SUM": add, "AVERAGE": add, "MIN": Term.at_most, "MAX": Term.at_least}


@fallback_rule("Forest")
def lower_forest(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Walk all trees of a group to their leaves, then add up the groups."""
    *_, roots, weights = node.inputs
    count, aggregate = len(ctx.constant(roots)), node.attrs["aggregate"]
    unrolled, inner = _walk(ctx.constant(node.inputs[1]), ctx.constant(roots), int(node.attrs["depth"]))
    together = max(min(IN_LOOP if inner else AT_ONCE, count, WRITTEN // max(unrolled, 1)), 1)
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape, (-(-count // together),))
    row, target = w.axes
    trees = [w.along(Linear(first, ((len(w.loops), together),))) for first in range(together)]
    positions = [w.at(roots, [tree.at_most(count - 1) if count % together else tree]).to("i64") for tree in trees]
    flags = np.unique(ctx.constant(node.inputs[1])[:, COLUMN] & (1 << FLAGS) - 1)
    for _ in range(unrolled):
        positions = [_step(w, node, row, position, flags) for position in positions]
    if inner:
        positions = w.repeat_while(positions,
                                   lambda positions: [_step(w, node, row, position, flags) for position in positions],
                                   lambda positions: _any_below(positions, inner))
    values = [w.at(weights, [position, target]) for position in positions]
    if count % together and _REDUCTIONS[aggregate] == "sum":        # the last tree counts once
        values = [w.where(tree < count, value, 0) for tree, value in zip(trees, values, strict=True)]
    value = w.reduce(_REDUCTIONS[aggregate], reduce(_TOGETHER[aggregate], values))
    return [w.call(value * (1 / count) if aggregate == "AVERAGE" else value)]


def _walk(records: Array, roots: Array, depth: int) -> tuple[int, int]:
    """Choose how trees are walked: as many unrolled steps as the deepest leaf needs, or fewer and then a loop.

    Returns
    -------
    The number of unrolled steps, and the number of inner nodes if a loop follows, else 0. All nodes after the inner
    ones are leaves.
    """
    is_inner = records[:, LEFT] != np.arange(len(records))
    inner = int(is_inner.sum())
    expected = _expected_steps(records, is_inner, roots, min(depth, DEEPEST))
    if is_inner[:inner].all() and (depth > DEEPEST or TEST * expected < depth):
        return int(expected / UNROLLED), inner
    if depth > DEEPEST:
        raise Refused(f"a tree has {depth} levels; at most {DEEPEST} are compiled")
    return depth, 0


def _expected_steps(records: Array, is_inner: Array, roots: Array, depth: int) -> float:
    """Return the mean number of steps, `depth` at most, until all of IN_LOOP trees are at leaves.

    At every node half of the rows go left.
    """
    shares: Array = np.bincount(roots, minlength=len(records)) / len(roots)     # share of the rows, by node
    steps = 0.0
    for _ in range(depth):
        nodes = np.flatnonzero(is_inner & (shares > 0))
        steps += 1 - max(1 - float(shares[nodes].sum()), 0) ** IN_LOOP
        children = np.append(records[nodes, LEFT], records[nodes, RIGHT])
        shares = np.bincount(children, np.tile(shares[nodes] / 2, 2), len(records))
    return steps


def _any_below(positions: Sequence[Term], limit: int) -> Term:
    """Return a test whether any place is below the limit: the sign bit of the union of differences."""
    return reduce(lambda a, b: a.binary("or", b), [position - limit for position in positions]) < 0


def _step(w: NestWriter, node: Node, row: Term, position: Term, known: Array) -> Term:
    """Step from each node to a child.

    `known` are the flags that occur; flags that all or no nodes have are not tested.
    """
    x, nodes, *_ = node.inputs
    flagged, bits, right, left = (w.at(nodes, [position, w.constant(field, "i64")])
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
