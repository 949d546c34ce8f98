"""Rewrite views in one form, and merge adjacent ones.

    Flatten(x) = Squeeze(x) = Unsqueeze(x) = Reshape(x, shape)
    Transpose(x) = Reshape(x, shape)                 if it only moves axes of extent 1
    Reshape(Reshape(x, a), b) = Reshape(x, b)
    Transpose(Transpose(x, p), q) = Transpose(x, p[q])
"""
from __future__ import annotations

from infer_server.engines.ir.graph import Dim
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, P, Rule, Value


class ToReshape(Rule):
    pattern = P("Flatten Squeeze Unsqueeze", Value("x"))

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish_view("Reshape", match.value("x"))


class TransposeOfOnes(ToReshape):
    """Replace a Transpose that only moves axes of extent 1, which keeps the order of elements, by a Reshape."""
    pattern = P("Transpose", Value("x"))

    def check(self, match: Match) -> bool:
        return moves_only_ones(match.root.attrs["perm"], match.shape(match.value("x")))


class MergeReshapes(ToReshape):
    pattern = P("Reshape", P("Reshape", Value("x")))


class MergeTransposes(Rule):
    pattern = P("Transpose", P("Transpose", Value("x"), bind="first"))

    def rewrite(self, match: Match, draft: Draft) -> None:
        first, second = match["first"].attrs["perm"], match.root.attrs["perm"]
        draft.finish("Transpose", [match.value("x")], {"perm": tuple(first[axis] for axis in second)})


def moves_only_ones(perm: tuple[int, ...], shape: tuple[Dim, ...]) -> bool:
    long = [axis for axis in perm if shape[axis] != 1]
    return long == sorted(long)
