"""Rewrite a Resize of channels-last images as one of channels-first images between Transposes.

    Resize(x) along the middle axes = Transpose(Resize(Transpose(x)), back)

The layout pass removes the Transposes, since it stores images channels last.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infer_server.engines.ops import resize
from infer_server.engines.passes.rewriting.rewrite import Draft, Match, P, Rule, Value

_FIRST, _LAST = (0, 3, 1, 2), (0, 2, 3, 1)          # the channels of an image, seen from where they were


class ResizeOfChannelsLast(Rule):
    pattern = P("Resize", Value("x"))

    def check(self, match: Match) -> bool:
        before, after = match.shape(match.value("x")), match.type.shape
        scales = match.root.attrs.get("scales", (1,) * len(before))
        changed = [a != b or scale != 1 for a, b, scale in zip(before, after, scales, strict=True)]
        if match.graph.types[match.value("x")].dtype.itemsize == 1:     # blended in fixed point, where it is
            return False
        return len(before) == 4 and changed[1] and not changed[0] and not changed[3]

    def rewrite(self, match: Match, draft: Draft) -> None:
        images = draft.node("Transpose", [match.value("x")], {"perm": _FIRST})
        made = draft.node("Resize", [images], _along(match.root.attrs, _FIRST))
        draft.finish("Transpose", [made], {"perm": _LAST})


def _along(attrs: Mapping[str, Any], perm: Sequence[int]) -> dict[str, Any]:
    """Return the attributes with the entries of each axis permuted."""
    moved = dict(attrs)
    for name in resize.BY_AXIS & attrs.keys():
        count = len(attrs[name]) // len(perm)       # a region of interest has two for each axis
        moved[name] = tuple(attrs[name][part * len(perm) + axis] for part in range(count) for axis in perm)
    return moved
