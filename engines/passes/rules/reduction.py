"""Rarer reductions by ReduceSum.

    ReduceL1(x) = ReduceSum(|x|)    ReduceSumSquare(x) = ReduceSum(x * x)    ReduceL2(x) = sqrt(ReduceSum(x * x))
"""
from __future__ import annotations

from engines.ir import TensorType
from engines.passes.rewrite import Draft, Match, P, Rule, Value


class ReductionOfPowers(Rule):
    pattern = P("ReduceL1 ReduceL2 ReduceSumSquare", Value("x"))

    def check(self, match: Match) -> bool:
        return bool(match.graph.types[match.value("x")].dtype.kind == "f")

    def rewrite(self, match: Match, draft: Draft) -> None:
        name, root = match.value("x"), match.root
        x, y = (match.graph.types[tensor] for tensor in (name, root.outputs[0]))
        power = ("Abs", [name]) if root.op == "ReduceL1" else ("Mul", [name, name])
        terms = draft.node(*power, TensorType(x.dtype, x.shape))
        if root.op != "ReduceL2":
            draft.finish("ReduceSum", [terms], root.attrs)
            return
        total = draft.node("ReduceSum", [terms], TensorType(y.dtype, y.shape), root.attrs)
        draft.finish("Sqrt", [total])
