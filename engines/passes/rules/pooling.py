"""Rewrite means and maxima over whole images as global pools.

    ReduceMean(x, spatial axes) = GlobalAveragePool(x)          ReduceMax: GlobalMaxPool; reversed for one axis
    AveragePool(x, kernel = extents of x) = GlobalAveragePool(x)
"""
from __future__ import annotations

from infer_server.engines.passes.rewriting.facts import pads
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, P, Rule, Value

_GLOBAL = {"ReduceMean": "GlobalAveragePool", "ReduceMax": "GlobalMaxPool",
           "AveragePool": "GlobalAveragePool", "MaxPool": "GlobalMaxPool"}


class SpatialReduce(Rule):
    """Replace a reduction of all spatial axes by a global pool; `channels_last` says that the channels are last."""
    pattern = P("ReduceMean ReduceMax", Value("x"))

    def __init__(self, channels_last: bool = False) -> None:
        self.attrs = {"channels_last": 1} if channels_last else {}

    def check(self, match: Match) -> bool:
        rank = len(match.shape(match.value("x")))
        first = 1 if self.attrs else 2
        axes = sorted(axis % rank for axis in match.root.attrs.get("axes", range(rank)))
        return rank in (4, 5) and axes == list(range(first, first + rank - 2))

    def rewrite(self, match: Match, draft: Draft) -> None:
        op = _GLOBAL[match.root.op]
        if match.root.attrs.get("keepdims", 1):
            draft.finish(op, [match.value("x")], self.attrs)
            return
        draft.finish_view("Reshape", draft.node(op, [match.value("x")], self.attrs))


class GlobalPoolOfRows(Rule):
    """Replace a global pool of signals [N, C, L], which has no image layout, by a reduction."""
    pattern = P("GlobalAveragePool GlobalMaxPool", Value("x"))

    def check(self, match: Match) -> bool:
        return len(match.shape(match.value("x"))) == 3

    def rewrite(self, match: Match, draft: Draft) -> None:
        op = "ReduceMean" if match.root.op == "GlobalAveragePool" else "ReduceMax"
        draft.finish(op, [match.value("x")], {"axes": (2,), "keepdims": 1})


class WholeImagePool(Rule):
    pattern = P("AveragePool MaxPool", Value("x"))

    def check(self, match: Match) -> bool:
        pool, extents = match.root, match.shape(match.value("x"))[2:]
        return (len(pool.outputs) == 1 and tuple(pool.attrs["kernel_shape"]) == tuple(extents)
                and not any(pads(pool, len(extents))))

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish(_GLOBAL[match.root.op], [match.value("x")])
