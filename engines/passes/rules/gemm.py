"""Matrix products by constants in one form: Gemm(x, W [N, K], b [N]) = x W' + b.

    alpha * x B + beta * C = x (alpha B')' + beta C
    MatMul(x [M, K], B [K, N]) = Gemm(x, B')
"""
from __future__ import annotations

import numpy as np

from engines.passes.rewriting.facts import per_channel
from engines.passes.rewriting.rewrite import Constant, Draft, Match, No, P, Rule, Value
from engines.passes.rules.linear import is_canonical


class CanonicalGemm(Rule):
    pattern = P("Gemm", Value("x"), Constant("weight"))

    def check(self, match: Match) -> bool | No:
        if match.root.attrs.get("transA"):
            return No("its left factor is transposed")
        return not is_canonical(match.graph, match.root)

    def rewrite(self, match: Match, draft: Draft) -> None:
        attrs, weight = match.root.attrs, match.constant("weight")
        rows = weight if attrs.get("transB") else weight.T
        scaled = np.ascontiguousarray(rows * weight.dtype.type(attrs.get("alpha", 1)))
        inputs = [match.value("x"), draft.constant("weight", scaled)]
        extra = (*match.root.inputs, "")[2]
        if not extra:
            draft.finish("Gemm", inputs, {"transB": 1})
            return
        beta = attrs.get("beta", 1)
        constant = match.graph.constants.get(extra)
        bias = None if constant is None else per_channel(constant, 2, len(rows))
        if bias is not None:
            inputs.append(draft.constant("bias", (bias * weight.dtype.type(beta)).astype(weight.dtype)))
            draft.finish("Gemm", inputs, {"transB": 1})
            return
        product = draft.node("Gemm", inputs, {"transB": 1})
        if beta != 1:
            factor = draft.constant("beta", np.full(1, beta, weight.dtype))
            extra = draft.node("Mul", [extra, factor])
        draft.finish("Add", [product, extra])


class MatMulToGemm(Rule):
    """Only for a matrix on the left: with more axes it stays a MatMul."""
    pattern = P("MatMul", Value("x"), Constant("weight"))

    def check(self, match: Match) -> bool:
        return match.constant("weight").ndim == 2 and len(match.shape(match.value("x"))) == 2

    def rewrite(self, match: Match, draft: Draft) -> None:
        weight = draft.constant("weight", np.ascontiguousarray(match.constant("weight").T))
        draft.finish("Gemm", [match.value("x"), weight], {"transB": 1})
