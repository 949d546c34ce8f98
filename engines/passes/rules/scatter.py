"""Assignments to a part of a tensor are joints of what stays and what is new.

    ScatterND(x, rows i, i + 1, ... j - 1, new) = Concat(x[:i], new, x[j:])         along the first axis
"""
from __future__ import annotations

import numpy as np

from engines.ir.counted import as_int
from engines.passes.rewriting.rewrite import Constant, Draft, Match, No, P, Rule, Value


class ScatterOfRows(Rule):
    pattern = P("ScatterND", Value("x"), Constant("rows"), Value("new"))

    def check(self, match: Match) -> bool | No:
        rows, extent = match.constant("rows"), match.shape(match.value("x"))[0]
        if match.root.attrs.get("reduction", "none") != "none":
            return No("it adds to what is there")
        if rows.ndim != 2 or rows.shape[1] != 1 or not isinstance(extent, int) or not rows.size:
            return No("its places are no rows")
        first = int(rows[0, 0]) % extent
        follow = np.array_equal(rows[:, 0] % extent, np.arange(first, first + len(rows)))
        return follow or No("its rows do not follow each other")

    def rewrite(self, match: Match, draft: Draft) -> None:
        rows, extent = match.constant("rows"), as_int(match.shape(match.value("x"))[0])
        first = int(rows[0, 0]) % extent
        before, behind = ([draft.cut(match.value("x"), 0, start, end)] if start < end else []
                          for start, end in ((0, first), (first + len(rows), extent)))
        parts = [*before, match.value("new"), *behind]
        draft.finish("Concat", parts, {"axis": 0})
