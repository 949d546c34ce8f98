"""Rarer reductions by commoner ones.

    ReduceL1(x) = ReduceSum(|x|)    ReduceSumSquare(x) = ReduceSum(x * x)    ReduceL2(x) = sqrt(ReduceSum(x * x))
    ReduceSum(integers) = the last of CumSum(integers)
"""
from __future__ import annotations

from engines.ir.graph import TensorType
from engines.passes.rewriting.rewrite import Draft, Match, P, Rule, Value


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


class SumOfIntegers(Rule):
    """Along one axis behind the batch: how many tokens there are"""
    pattern = P("ReduceSum", Value("x"))

    def check(self, match: Match) -> bool:
        kind, axes = match.graph.types[match.value("x")], match.root.attrs.get("axes", ())
        return kind.dtype.kind == "i" and len(axes) == 1 and isinstance(kind.shape[axes[0]], int) and axes[0] > 0

    def rewrite(self, match: Match, draft: Draft) -> None:
        kind, (axis,) = match.graph.types[match.value("x")], match.root.attrs["axes"]
        extent = int(kind.shape[axis])
        sums = draft.node("CumSum", [match.value("x")], kind, {"axis": axis, "exclusive": 0, "reverse": 0})
        last = TensorType(kind.dtype, (*kind.shape[:axis], 1, *kind.shape[axis + 1:]))
        total = draft.node("Slice", [sums], last, {"axes": (axis,), "starts": (extent - 1,), "ends": (extent,),
                                                   "steps": (1,)})
        draft.finish("Reshape", [total], {"shape": match.shape(match.root.outputs[0])})
