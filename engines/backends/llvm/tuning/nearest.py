"""Tactics for problems that were not timed: by their cost, corrected by times of the nearest problem.

The kernels of a model at two lengths solve problems that differ in some extents and strides only. As text they have
equal patterns and different numbers:

    distance = sum over the numbers of |log((a + 1) / (b + 1))|

So a layer at another length is nearer than any other layer, because its channels and taps are equal. The ratio of time
to cost of a tactic there is used here:

    estimate = cost here * (time there / cost there) ** trust

The cost tells that 77 rows are twelve tiles of six and one of five, and that 128 are 32 of four; the time tells how
fast a tile of six is on this machine. A tactic that was not timed there gets the correction of the nearest one. Flags
count as numbers: if only tiles without prefetch were timed, since another kernel won, a tile with prefetch gets their
correction.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

_NUMBER, _NUMBER_OR_FLAG = re.compile(r"\d+(?:\.\d+)?"), re.compile(r"\d+(?:\.\d+)?|False|True")
_FLAGS = {"False": 0.0, "True": 1.0}

Pattern = tuple[str, tuple[float, ...]]     # text with its numbers replaced by #, and the numbers
Corrections = Mapping[str, float]           # repr() of a tactic -> time / cost


class Timed:
    """Corrections by kernel, as repr() writes it. Corrections of kernels for one problem are comparable."""

    def __init__(self, corrections: Mapping[str, Corrections]) -> None:
        self._by_pattern: dict[str, list[tuple[tuple[float, ...], Corrections]]] = {}
        self._nearest: dict[str, Corrections] = {}
        for kernel, found in corrections.items():
            pattern, numbers = _pattern(kernel)
            self._by_pattern.setdefault(pattern, []).append((numbers, found))

    def __bool__(self) -> bool:
        return bool(self._by_pattern)

    def of(self, kernel: object) -> Corrections:
        """Return the corrections of the nearest kernel with the same pattern; {} if there is none."""
        text = repr(kernel)
        if text not in self._nearest:
            self._nearest[text] = self._nearest_of(*_pattern(text))
        return self._nearest[text]

    def _nearest_of(self, pattern: str, numbers: tuple[float, ...]) -> Corrections:
        return min(((_distance(numbers, known), found) for known, found in self._by_pattern.get(pattern, ())),
                   key=lambda pair: pair[0], default=(0.0, {}))[1]


def correction(tactic: object, known: Corrections) -> float:
    """Return the correction of the tactic, or of the nearest one with the same pattern; infinity if there is none."""
    pattern, numbers = _pattern(repr(tactic), _NUMBER_OR_FLAG)
    alike = [(_distance(numbers, others), factor) for text, factor in known.items()
             for theirs, others in [_pattern(text, _NUMBER_OR_FLAG)] if theirs == pattern]
    return min(alike, key=lambda pair: pair[0], default=(0.0, math.inf))[1]


@lru_cache(1 << 14)
def _pattern(text: str, number: re.Pattern[str] = _NUMBER) -> Pattern:
    return number.sub("#", text), tuple(float(_FLAGS.get(one, one)) for one in number.findall(text))


def _distance(numbers: tuple[float, ...], others: tuple[float, ...]) -> float:
    return sum(abs(math.log((a + 1) / (b + 1))) for a, b in zip(numbers, others, strict=True) if a != b)
