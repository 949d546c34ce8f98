"""Tactics for problems that nobody has timed: by their cost, corrected by what was timed for the nearest problem.

A model's kernels at one length and at another solve problems that differ in some extents and strides only. Written as
text, they have the same words, and other numbers:

    distance = sum over the numbers of |log((a + 1) / (b + 1))|

So the layer itself at another length is nearer than any other layer: its channels and taps are the same numbers. As far
as a tactic's time was from its cost there, it is here:

    estimate = cost here * (time there / cost there) ** trust

The cost knows that 77 rows are twelve tiles of six and one of five, where 128 are 32 of four; the time there, what a
tile of six is worth on this machine. A tactic that was not timed there is corrected as the nearest one is, and its
flags count as numbers: where only tiles without prefetch were timed, since another kernel won, the same tile with it is
what its cost says.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

_NUMBER, _NUMBER_OR_FLAG = re.compile(r"\d+(?:\.\d+)?"), re.compile(r"\d+(?:\.\d+)?|False|True")
_FLAGS = {"False": 0.0, "True": 1.0}

Said = tuple[str, tuple[float, ...]]        # the words of a text, and its numbers
Corrections = Mapping[str, float]           # time / cost by tactic, as repr() writes it


class Timed:
    """What was timed: corrections by kernel, as repr() writes it. Those of kernels for one problem compare."""

    def __init__(self, corrections: Mapping[str, Corrections]) -> None:
        self._by_words: dict[str, list[tuple[tuple[float, ...], Corrections]]] = {}
        self._nearest: dict[str, Corrections] = {}
        for kernel, found in corrections.items():
            words, numbers = _said(kernel)
            self._by_words.setdefault(words, []).append((numbers, found))

    def __bool__(self) -> bool:
        return bool(self._by_words)

    def of(self, kernel: object) -> Corrections:
        """Those of the nearest kernel with the same words; {} if there is none."""
        text = repr(kernel)
        if text not in self._nearest:
            self._nearest[text] = self._found(*_said(text))
        return self._nearest[text]

    def _found(self, words: str, numbers: tuple[float, ...]) -> Corrections:
        return min(((_distance(numbers, known), found) for known, found in self._by_words.get(words, ())),
                   key=lambda pair: pair[0], default=(0.0, {}))[1]


def correction(tactic: object, known: Corrections) -> float:
    """That of the tactic, or of the one with the same words and the nearest numbers and flags; infinity if none has."""
    words, numbers = _said(repr(tactic), _NUMBER_OR_FLAG)
    alike = [(_distance(numbers, others), factor) for text, factor in known.items()
             for theirs, others in [_said(text, _NUMBER_OR_FLAG)] if theirs == words]
    return min(alike, key=lambda pair: pair[0], default=(0.0, math.inf))[1]


@lru_cache(1 << 14)
def _said(text: str, number: re.Pattern[str] = _NUMBER) -> Said:
    return number.sub("#", text), tuple(float(_FLAGS.get(one, one)) for one in number.findall(text))


def _distance(numbers: tuple[float, ...], others: tuple[float, ...]) -> float:
    return sum(abs(math.log((a + 1) / (b + 1))) for a, b in zip(numbers, others, strict=True) if a != b)
