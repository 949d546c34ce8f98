"""Replace ShuffleNet's channel shuffle by one Gather of channels.

    Reshape(Transpose(Reshape(x [N, a*b, ...], [N, a, b, ...]), swap a and b), [N, b*a, ...])
    = Gather(x, indices, axis=1)        indices[j * a + i] = i * b + j
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, P, Rule, Value


class ChannelShuffle(Rule):
    pattern = P("Reshape", P("Transpose", P("Reshape", Value("x"), bind="apart"), bind="swap"), bind="together")

    def check(self, match: Match) -> bool:
        x, apart = match.shape(match.value("x")), match.shape(match["apart"].outputs[0])
        perm = tuple(match["swap"].attrs["perm"])
        return (len(apart) == len(x) + 1 and apart[0] == x[0] and apart[3:] == x[2:]
                and perm == (0, 2, 1, *range(3, len(apart))) and match.type.shape == x)

    def rewrite(self, match: Match, draft: Draft) -> None:
        a, b = (as_int(extent) for extent in match.shape(match["apart"].outputs[0])[1:3])
        indices = np.arange(a * b, dtype=np.int64).reshape(a, b).T.ravel()
        draft.finish("Gather", [match.value("x"), draft.constant("indices", indices)], {"axis": 1})
