"""Replace a product of one-hot rows, as TensorFlow's exporters write token types and bytes, by a Gather.

    ((i = 0, 1, ...) ? 1 : 0) @ W + c = (W + c)[i]          c alone if i is out of range
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, P, Rule, Value

_EQUAL = P("Equal", Value("places"), Constant("range"))
_HOT = (P("Where", _EQUAL, Constant("on"), Constant("off"), bind="hot"), P("Cast", _EQUAL, bind="hot"))


class OneHotProduct(Rule):
    def __init__(self, rows: P) -> None:
        self.pattern = P("MatMul Gemm", rows, Constant("weights"))

    def check(self, match: Match) -> bool:
        weights, numbers, root = match.constant("weights"), match.constant("range"), match.root
        rows, hot = match.root.inputs[0], match["hot"].outputs[0]
        *leading, last = match.shape(match.value("places")) or (0,)
        depth = numbers.size
        along_last = numbers.shape[-1:] == (depth,) and (*leading, depth) == match.shape(hot)
        plain = root.op == "MatMul" or not root.attrs.get("transA") and {1} >= {
            root.attrs.get(name, 1) for name in ("alpha", "beta")}
        return (weights.ndim == 2 and plain and last == 1 and along_last and match.shape(rows)[-1] == depth
                and all(match.graph.is_constant(name) for name in root.inputs[2:])
                and bool((numbers.ravel() == np.arange(depth)).all())
                and (match["hot"].op == "Cast" or bool(
                    (match.constant("on") == 1).all() and (match.constant("off") == 0).all())))

    def rewrite(self, match: Match, draft: Draft) -> None:
        weights, root = match.constant("weights"), match.root
        if root.attrs.get("transB"):
            weights = weights.T
        depth, columns = weights.shape
        table = np.concatenate([weights, np.zeros((1, columns), weights.dtype)])        # last row: out of range
        for name in root.inputs[2:]:
            table = table + match.graph.constants[name]
        places = draft.node("Reshape", [match.value("places")], {"shape": match.type.shape[:-1]})
        dtype = match.graph.types[match.value("places")].dtype
        none, first = (draft.constant(suffix, np.array(n, dtype)) for suffix, n in (("none", depth), ("first", 0)))
        places = draft.node("Where", [draft.node("Less", [places, first]), none, places])
        places = draft.node("Min", [places, none])
        draft.finish("Gather", [draft.constant("table", table), places], {"axis": 0})


ONE_HOT = tuple(OneHotProduct(rows) for hot in _HOT for rows in (hot, P("Reshape", hot)))
