"""Rewrite rare reductions by common ones.

    ReduceL1(x) = ReduceSum(|x|)    ReduceSumSquare(x) = ReduceSum(x * x)    ReduceL2(x) = sqrt(ReduceSum(x * x))
    ReduceSum(integers) = last element of CumSum(integers)
"""
from __future__ import annotations

from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, P, Rule, Value


class ReductionOfPowers(Rule):
    pattern = P("ReduceL1 ReduceL2 ReduceSumSquare", Value("x"))

    def check(self, match: Match) -> bool:
        return bool(match.graph.types[match.value("x")].dtype.kind == "f")

    def rewrite(self, match: Match, draft: Draft) -> None:
        x, root = match.value("x"), match.root
        terms = draft.node("Abs", [x]) if root.op == "ReduceL1" else draft.node("Mul", [x, x])
        if root.op != "ReduceL2":
            draft.finish("ReduceSum", [terms], root.attrs)
            return
        draft.finish("Sqrt", [draft.node("ReduceSum", [terms], root.attrs)])


class SumOfIntegers(Rule):
    """Replace a ReduceSum of integers along one axis after the batch, such as a count of tokens, by a CumSum."""
    pattern = P("ReduceSum", Value("x"))

    def check(self, match: Match) -> bool:
        kind, axes = match.graph.types[match.value("x")], match.root.attrs.get("axes", ())
        return kind.dtype.kind == "i" and len(axes) == 1 and axes[0] > 0 and (
            isinstance(extent := kind.shape[axes[0]], int) and extent > 0)

    def rewrite(self, match: Match, draft: Draft) -> None:
        (axis,) = match.root.attrs["axes"]
        extent = as_int(match.shape(match.value("x"))[axis])
        sums = draft.node("CumSum", [match.value("x")], {"axis": axis, "exclusive": 0, "reverse": 0})
        draft.finish_view("Reshape", draft.cut(sums, axis, extent - 1, extent))
