"""General rules for products of any dtype and order of axes: MatMul, Gemm, Einsum, integer products."""
from __future__ import annotations

from collections.abc import Sequence

from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.nest.program import FLOATING, Term


def _depth(ctx: Context, name: str, axis: int) -> int:
    extent = ctx.type(name).shape[axis]
    if extent == BATCH:
        raise Refused("it sums over the items of a batch")
    return as_int(extent)


@fallback_rule("MatMul", "MatMulInteger")
def lower_matmul(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    anchor = node.anchor
    left, right, *zeros = anchor.inputs
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape, (_depth(ctx, left, -1),))
    ranks = [len(ctx.type(name).shape) for name in (left, right)]
    lead = w.axes[:len(w.axes) - sum(rank > 1 for rank in ranks)]
    rows, columns = w.axes[len(lead):len(lead) + (ranks[0] > 1)], w.axes[len(w.axes) - (ranks[1] > 1):]
    (inner,) = w.inner
    a = _factor(w, left, lead, [*rows, inner])
    b = _factor(w, right, lead, [inner, *(columns if ranks[1] > 1 else ())])
    if anchor.op == "MatMulInteger":
        a, b = a.to("i32"), b.to("i32")
        if zeros[:1] and zeros[0]:
            a = a - _zero_point(w, zeros[0], rows)
        if zeros[1:] and zeros[1]:
            b = b - _zero_point(w, zeros[1], columns)
    return [w.call(w.finished(w.reduce("sum", a * b)))]


def _factor(w: NestWriter, name: str, lead: Sequence[Term], last: Sequence[Term]) -> Term:
    shape = w.ctx.type(name).shape
    count = len(shape) - len(last)
    zero = w.constant(0, "i64")
    first = [zero if extent == 1 else index for extent, index in zip(shape[:count], lead[len(lead) - count:],
                                                                     strict=True)]
    return w.at(name, [*first, *last])


def _zero_point(w: NestWriter, name: str, index: Sequence[Term]) -> Term:
    shape = w.ctx.type(name).shape
    if len(shape) > 1:
        raise Refused("its zero points differ between items")
    return w.at(name, [w.constant(0, "i64") if extent == 1 else index[0] for extent in shape]).to("i32")


@fallback_rule("Gemm")
def lower_gemm(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    anchor = node.anchor
    left, right, *third = anchor.inputs
    turned = [bool(anchor.attrs.get(key)) for key in ("transA", "transB")]
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape, (_depth(ctx, left, 0 if turned[0] else -1),))
    (row, column), (inner,) = w.axes, w.inner
    a = w.at(left, [inner, row] if turned[0] else [row, inner])
    b = w.at(right, [column, inner] if turned[1] else [inner, column])
    value = _scaled(w.reduce("sum", a * b), anchor.attrs.get("alpha", 1))
    if third and third[0]:
        value = value + _scaled(w.broadcast(third[0]), anchor.attrs.get("beta", 1))
    return [w.call(w.finished(value))]


def _scaled(value: Term, factor: float) -> Term:
    if factor == 1:
        return value
    if value.kind in FLOATING:
        return value * float(factor)
    return (value.to("f64") * float(factor)).to(value.kind)


@fallback_rule("Einsum")
def lower_einsum(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower an Einsum with one loop per letter, outer loops for the result's.

    An ellipsis stands for right-aligned axes.
    """
    terms, result = _letters(ctx, node)
    extents: dict[str, int | str] = {}
    for name, term in zip(node.inputs, terms, strict=True):
        for letter, extent in zip(term, ctx.type(name).shape, strict=True):
            if extents.get(letter, 1) == 1:
                extents[letter] = extent
    summed = [letter for letter in extents if letter not in result]
    if any(extents[letter] == BATCH for letter in summed):
        raise Refused("it sums over the items of a batch")
    w = NestWriter(ctx, node, [extents[letter] for letter in result], [as_int(extents[letter]) for letter in summed])
    loops = dict(zip([*result, *summed], [*w.axes, *w.inner], strict=True))
    zero, product = w.constant(0, "i64"), None
    for name, term in zip(node.inputs, terms, strict=True):
        factor = w.at(name, [zero if extent == 1 else loops[letter] for letter, extent in zip(
            term, ctx.type(name).shape, strict=True)])
        product = factor if product is None else product * factor
    assert product is not None
    return [w.call(w.reduce("sum", product) if summed else product)]


def _letters(ctx: Context, node: Node) -> tuple[list[list[str]], list[str]]:
    """Return the axes of each factor and of the result as letters, with digits for the axes of an ellipsis."""
    equation = node.attrs["equation"]
    equation = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = []
    for name, term in zip(node.inputs, left.split(","), strict=True):
        hidden = len(ctx.type(name).shape) - len(term.replace("...", ""))
        terms.append(_with_numbers(term, hidden))
    if arrow:
        most = max(sum(letter.isdigit() for letter in term) for term in terms)
        return terms, _with_numbers(right, most)
    every = "".join(left.replace("...", "").split(","))
    once = sorted(letter for letter in set(every) if every.count(letter) == 1)
    numbers = max((term for term in terms), key=lambda term: sum(letter.isdigit() for letter in term))
    return terms, [*(letter for letter in numbers if letter.isdigit()), *once]


def _with_numbers(term: str, hidden: int) -> list[str]:
    before, dots, after = term.partition("...")
    return [*before, *(str(i) for i in reversed(range(hidden)) if dots), *after]
