"""Rows taken out of their tensor to be multiplied, and put back: they may as well stay where they are.

    f(Reshape(x [..., K], [M, K])) = Reshape(f(x), [M, N])      f: a product of rows, or a function of their elements

Exporters write it around a linear layer over all steps of a sequence, [steps, batch, K] -> [steps * batch, K]. There
the leading extent is no batch of items, and no kernel could take it apart; the Reshape behind it undoes the one in
front.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.ir import BATCH, Dim, TensorType
from engines.ops import OPS
from engines.passes.rewrite import Constant, Draft, Match, P, Rule, Value

_POINTWISE = " ".join(sorted(name for name, op in OPS.items() if op.pointwise))


def _leading(match: Match) -> tuple[Dim, ...] | None:
    """The axes of x that the Reshape in front makes rows of, if their number is a multiple of the batch."""
    x, rows = match.shape(match.value("x")), match.shape(match["reshape"].outputs[0])
    if len(rows) != 2 or not isinstance(rows[0], str) or rows[0] == BATCH:
        return None
    return next((x[:cut] for cut in range(2, len(x)) if BATCH in x[:cut] and math.prod(
        extent for extent in x[cut:] if isinstance(extent, int)) == rows[1]), None)


def _rows_in_place(match: Match, draft: Draft) -> str:
    """x, its rows' elements one axis."""
    x, leading = match.value("x"), _leading(match)
    assert leading is not None
    kind = match.graph.types[match["reshape"].outputs[0]]
    shape = (*leading, kind.shape[1])
    return x if match.shape(x) == shape else draft.node("Reshape", [x], TensorType(kind.dtype, shape), {"shape": shape})


def _in_place(match: Match) -> TensorType:
    """The type of the result where the rows stay in x."""
    made = match.graph.types[match.root.outputs[0]]
    return TensorType(made.dtype, (*(_leading(match) or ()), made.shape[1]))


class ProductOfRows(Rule):
    pattern = P("Gemm", P("Reshape", Value("x"), bind="reshape"), Constant("weight"))

    def check(self, match: Match) -> bool:
        gemm, constants = match.root, match.graph.constants
        return (_leading(match) is not None and bool(gemm.attrs.get("transB")) and not gemm.attrs.get("transA")
                and gemm.attrs.get("alpha", 1) == gemm.attrs.get("beta", 1) == 1
                and all(name in constants for name in gemm.inputs[2:]))

    def rewrite(self, match: Match, draft: Draft) -> None:
        kind, (_, _, *bias) = _in_place(match), match.root.inputs
        weight = draft.constant("weight", np.ascontiguousarray(match.constant("weight").T))
        rows = draft.node("MatMul", [_rows_in_place(match, draft), weight], kind)
        if bias and bias[0]:
            rows = draft.node("Add", [rows, draft.constant("bias", match.graph.constants[bias[0]].reshape(-1))], kind)
        draft.finish("Reshape", [rows], {"shape": match.shape(match.root.outputs[0])})


class FunctionOfRows(Rule):
    """Beside constants that are the same for every row."""
    pattern = P(f"{_POINTWISE} Softmax LogSoftmax", P("Reshape", Value("x"), bind="reshape"))

    def check(self, match: Match) -> bool:
        _, *others = match.root.inputs
        constants = [match.graph.constants.get(name) for name in others if name]
        same_for_all = all(c is not None and math.prod(c.shape[:-1]) == 1 for c in constants)
        along = match.root.attrs.get("axis", -1) % 2 == 1 if match.root.op.endswith("Softmax") else True
        return _leading(match) is not None and len(match.root.outputs) == 1 and same_for_all and along

    def rewrite(self, match: Match, draft: Draft) -> None:
        attrs: dict[str, Any] = dict(match.root.attrs)
        if match.root.op.endswith("Softmax"):
            attrs["axis"] = len(_leading(match) or ())
        others = [draft.constant("same", _row(match.graph.constants[name])) if name else ""
                  for name in match.root.inputs[1:]]
        made = draft.node(match.root.op, [_rows_in_place(match, draft), *others], _in_place(match), attrs)
        shape: Sequence[Dim] = match.shape(match.root.outputs[0])
        draft.finish("Reshape", [made], {"shape": tuple(shape)})


def _row(constant: Any) -> Any:
    return constant.reshape(constant.shape[-1:])
