"""General rules for reductions over any axes and dtype, and for normalisations along an axis."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.calls.placement import Placement
from infer_server.engines.lowering.nest.pointwise import EXP, LOG
from infer_server.engines.lowering.nest.program import FLOATING, Term
from infer_server.engines.ops import op_of


class Along:
    """Nest whose inner loops are some axes of a node's input, and whose outer loops are the others."""

    def __init__(self, ctx: Context, node: Node, axes: Sequence[int]) -> None:
        name = node.anchor.inputs[0]
        shape = ctx.type(name).shape
        if any(shape[axis] == BATCH for axis in axes):
            raise Refused("it reduces the batch axis")
        if len(set(axes)) < len(axes):
            raise Refused("it names an axis twice")
        self.name, self.axes = name, tuple(axes)
        others = [axis for axis in range(len(shape)) if axis not in axes]
        self.writer = NestWriter(ctx, node, [shape[axis] for axis in others], [as_int(shape[axis]) for axis in axes])
        indices = {**dict(zip(others, self.writer.axes, strict=True)),
                   **dict(zip(axes, self.writer.inner, strict=True))}
        self.index = [indices[axis] for axis in range(len(shape))]      # index of the input's element
        self._item = [axis for axis in range(len(shape)) if shape[axis] != BATCH]       # in memory the batch leads
        self.x = self.writer.at(name, self.index)
        self.count = math.prod(self.writer.reduced)

    def broadcast(self, name: str) -> Term:
        """Return the element of another tensor, broadcast to the input."""
        shape = self.writer.ctx.type(name).shape
        zero = self.writer.constant(0, "i64")
        last = self.index[len(self.index) - len(shape):]
        return self.writer.at(name, [zero if extent == 1 else index for extent, index in zip(shape, last, strict=True)])

    def outer(self, output: str) -> Placement:
        """Return the placement of an output over the outer loops, with or without kept axes of extent 1."""
        target = self.writer.target(output)
        lost = len(self.index) - len(self.axes) - self.writer.batched
        if len(target.view.shape) == lost:
            return target
        return _ordered(target, self._order[:lost])

    def whole(self, output: str) -> Placement:
        """Return the placement of an output of the input's shape over all loops."""
        return _ordered(self.writer.target(output), self._order)

    @property
    def _order(self) -> list[int]:
        """Axes of the input's item: those of the outer loops, then those of the inner loops."""
        others = [axis for axis in self._item if axis not in self.axes]
        return [self._item.index(axis) for axis in (*others, *self.axes)]


def _ordered(target: Placement, axes: Sequence[int]) -> Placement:
    view = target.view
    return replace(target, view=replace(view, shape=tuple(view.shape[i] for i in axes),
                                        strides=tuple(view.strides[i] for i in axes)))


def _sum(w: NestWriter, term: Term) -> Term:
    return w.reduce("sum", term)


def _log_sum_exp(a: Along) -> Term:
    node, w = a.writer.node, a.writer

    def formula(x: Term) -> Term:
        most = w.reduce("max", x)
        most = w.where(most.unary("abs") < math.inf, most, 0.0)
        return LOG(node, _sum(w, EXP(node, x - most))) + most
    return _through_floats(a, formula)


def _mean(a: Along) -> Term:
    total = _sum(a.writer, a.x)
    return total * (1 / a.count) if total.kind in FLOATING else total.binary("div", a.count)


REDUCTIONS: Mapping[str, Callable[[Along], Term]] = {
    "ReduceSum": lambda a: _sum(a.writer, a.x), "ReduceMean": _mean,
    "ReduceMax": lambda a: a.writer.reduce("max", a.x), "ReduceMin": lambda a: a.writer.reduce("min", a.x),
    "ReduceProd": lambda a: a.writer.reduce("product", a.x),
    "ReduceL1": lambda a: _sum(a.writer, a.x.unary("abs")),
    "ReduceL2": lambda a: _rooted(_sum(a.writer, a.x * a.x)),
    "ReduceSumSquare": lambda a: _sum(a.writer, a.x * a.x),
    "ReduceLogSum": lambda a: _through_floats(a, lambda x: LOG(a.writer.node, _sum(a.writer, x))),
    "ReduceLogSumExp": _log_sum_exp,
}


def _rooted(total: Term) -> Term:
    return total.unary("sqrt") if total.kind in FLOATING else total.to("f64").unary("sqrt").to(total.kind)


def _through_floats(a: Along, formula: Callable[[Term], Term]) -> Term:
    return formula(a.x) if a.x.kind in FLOATING else formula(a.x.to("f64")).to(a.x.kind)


@fallback_rule(*REDUCTIONS)
def lower_reduction(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    anchor = node.anchor
    if len(anchor.inputs) > 1:
        raise Refused("its axes are computed at run time")
    axes = op_of(anchor.op).axes(anchor, len(ctx.type(anchor.inputs[0]).shape))
    along = Along(ctx, node, sorted(axes))
    try:
        value = REDUCTIONS[anchor.op](along)
    except NotImplementedError as reason:
        raise Refused(str(reason)) from reason
    if node.body:
        raise Refused("a nest does not support its fused body")
    return [along.writer.call(value, targets=[along.outer(node.outputs[0])])]


@fallback_rule("ArgMax", "ArgMin")
def lower_arg(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    along = Along(ctx, node, op_of(node.op).axes(node, len(ctx.type(node.inputs[0]).shape)))
    order = "last" if node.attrs.get("select_last_index") else "first"
    value = along.writer.reduce(f"{order}_{node.op[3:].lower()}", along.x)
    return [along.writer.call(value, targets=[along.outer(node.outputs[0])])]


# ---- results of the input's shape
def _softmax(a: Along) -> Term:
    """Return e**(x - max) over its sum, zeros for rows of -inf; or the logarithm of it."""
    node, w = a.writer.node, a.writer
    most = w.reduce("max", a.x)
    if node.anchor.op == "LogSoftmax":
        return a.x - most - LOG(node, _sum(w, EXP(node, a.x - most)))
    powers = EXP(node, a.x - w.where(most > -math.inf, most, 0.0))
    total = _sum(w, powers)
    return powers / w.where(total.equals(0.0), 1.0, total)


def _hardmax(a: Along) -> Term:
    w = a.writer
    found = w.reduce("first_max", a.x)
    (inner,) = w.inner
    return w.where(inner.equals(found), a.x.like(_one(a.x)), 0)


def _one(x: Term) -> float:
    return 1.0 if x.kind in FLOATING else 1


def _lp(a: Along) -> Term:
    """Return x over its norm; rows with norm 0 stay 0."""
    p, w = int(a.writer.node.attrs.get("p", 2)), a.writer
    size = _sum(w, a.x.unary("abs")) if p == 1 else _sum(w, a.x * a.x).unary("sqrt")
    return w.where(size.equals(0.0), 0.0, a.x / size)


def _normalised(a: Along) -> tuple[Term, Term, Term]:
    """Return the normalised x, the mean, and the reciprocal of the deviation."""
    anchor, w = a.writer.node.anchor, a.writer
    root = anchor.op == "RMSNormalization"
    middle = w.reduce("sum", a.x) * (1 / a.count)
    apart = a.x if root else a.x - middle
    variance = w.reduce("sum", apart * apart) * (1 / a.count)
    inverse = a.x.like(1.0) / (variance + float(anchor.attrs.get("epsilon", 1e-5))).unary("sqrt")
    return apart * inverse, middle, inverse


@fallback_rule("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")
def lower_softmax(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    rank = len(ctx.type(node.anchor.inputs[0]).shape)
    along = Along(ctx, node, [node.anchor.attrs.get("axis", -1) % rank])
    formula = {"Hardmax": _hardmax, "LpNormalization": _lp}.get(node.anchor.op, _softmax)
    if node.body:
        raise Refused("a nest does not support its fused body")
    try:
        return [along.writer.call(formula(along), inside=True, targets=[along.whole(node.outputs[0])])]
    except NotImplementedError as reason:
        raise Refused(str(reason)) from reason


@fallback_rule("LayerNormalization", "RMSNormalization")
def lower_norm(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a norm; each statistic that is an output has its own nest."""
    anchor = node.anchor
    rank = len(ctx.type(anchor.inputs[0]).shape)
    axes = range(anchor.attrs.get("axis", -1) % rank, rank)
    if node.body:
        raise Refused("a nest does not support its fused body")
    along = Along(ctx, node, axes)
    value, *_ = _normalised(along)
    for name, op in zip(anchor.inputs[1:], ("mul", "add"), strict=False):
        value = value.binary(op, along.broadcast(name)) if name else value
    calls = [along.writer.call(value, inside=True, targets=[along.whole(node.outputs[0])])]
    for output, which in ((output, which) for which, output in enumerate(node.outputs) if which and output):
        of_one = replace(node, outputs=(output,))
        statistics = Along(ctx, of_one, axes)
        calls.append(statistics.writer.call(_normalised(statistics)[which], targets=[statistics.outer(output)]))
    return calls
