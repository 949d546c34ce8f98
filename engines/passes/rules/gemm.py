"""Rewrite matrix products by constants in one form: Gemm(x, W [N, K], b [N]) = x W' + b.

    alpha * x B + beta * C = x (alpha B')' + beta C
    MatMul(x [M, K], B [K, N]) = Gemm(x, B')

A Gemm of two computed factors becomes a MatMul of Transposes, which its kernels read with strides:

    alpha * A' B' + beta * C = alpha (A' B') + beta C
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.graph import BATCH
from infer_server.engines.passes.rewriting.facts import per_channel
from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, No, P, Rule, Value
from infer_server.engines.passes.rules.linear import is_canonical


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
        draft.finish("Add", [product, _scaled(match, draft, extra, beta)])


class GemmOfComputed(Rule):
    """Rewrite a Gemm of computed factors, unless it transposes the batch axis."""
    pattern = P("Gemm", Value("a"), Value("b"))

    def check(self, match: Match) -> bool | No:
        attrs, a, b = match.root.attrs, match.value("a"), match.value("b")
        if match.graph.is_constant(b) and not attrs.get("transA"):
            return False
        if match.type.dtype != "float32":
            return No(f"its elements are {match.type.dtype}")
        if BATCH in match.shape(b) or attrs.get("transA") and BATCH in match.shape(a):
            return No("a batch is in what is transposed")
        return True

    def rewrite(self, match: Match, draft: Draft) -> None:
        attrs, (a, b, *rest) = match.root.attrs, match.root.inputs
        extra = "".join(rest)
        if attrs.get("transA"):
            a = draft.node("Transpose", [a], {"perm": (1, 0)})
        if match.graph.is_constant(b):
            draft.finish("Gemm", [a, b, *rest], {key: value for key, value in attrs.items() if key != "transA"})
            return
        if attrs.get("transB"):
            b = draft.node("Transpose", [b], {"perm": (1, 0)})
        alpha, beta = attrs.get("alpha", 1), attrs.get("beta", 1)
        if not extra and alpha == 1:
            draft.finish("MatMul", [a, b])
            return
        product = draft.node("MatMul", [a, b])
        if not extra:
            draft.finish("Mul", [product, _factor(match, draft, alpha)])
            return
        draft.finish("Add", [_scaled(match, draft, product, alpha), _scaled(match, draft, extra, beta)])


def _scaled(match: Match, draft: Draft, x: str, factor: float) -> str:
    return x if factor == 1 else draft.node("Mul", [x, _factor(match, draft, factor)])


def _factor(match: Match, draft: Draft, factor: float) -> str:
    return draft.constant("factor", np.full(1, factor, match.type.dtype))


class MatMulToGemm(Rule):
    """Rewrite a MatMul of two matrices as a Gemm; with more axes on the left it stays a MatMul."""
    pattern = P("MatMul", Value("x"), Constant("weight"))

    def check(self, match: Match) -> bool:
        return match.constant("weight").ndim == 2 and len(match.shape(match.value("x"))) == 2

    def rewrite(self, match: Match, draft: Draft) -> None:
        weight = draft.constant("weight", np.ascontiguousarray(match.constant("weight").T))
        draft.finish("Gemm", [match.value("x"), weight], {"transB": 1})
