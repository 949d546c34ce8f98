"""Tactics for problems that nobody has timed: that of the nearest one that somebody has.

A model's kernels at one length and at another solve problems that differ in some extents and strides only. Written as
text, they have the same words, and other numbers:

    distance = sum over the numbers of |log((a + 1) / (b + 1))|

So the layer itself at another length is nearer than any other layer: its channels and taps are the same numbers. The
tactic taken is the candidate that is nearest, in the same sense, to the one that was fastest there: a block of eight
rows of tiles becomes one of four where there are no more than five.
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

_NUMBER = re.compile(r"\d+(?:\.\d+)?")

T = TypeVar("T")
Said = tuple[str, tuple[float, ...]]        # the words of a text, and its numbers


class Timed:
    """What was fastest: tactics by kernel, both as their repr() has them."""

    def __init__(self, fastest: Mapping[str, str]) -> None:
        self._by_words: dict[str, list[tuple[tuple[float, ...], str]]] = {}
        for kernel, tactic in fastest.items():
            words, numbers = _said(kernel)
            self._by_words.setdefault(words, []).append((numbers, tactic))

    def __bool__(self) -> bool:
        return bool(self._by_words)

    def nearest(self, kernel: Any) -> tuple[float, str]:
        """(how far, the tactic) of the nearest kernel with the same words; infinitely far where there is none."""
        words, numbers = _said(repr(kernel))
        found = ((_distance(numbers, known), tactic) for known, tactic in self._by_words.get(words, ()))
        return min(found, default=(math.inf, ""))


def most_alike(text: str, candidates: Iterable[T], of: Callable[[T], Any]) -> T | None:
    """The candidate whose tactic, `of` it, has the words of the text and the nearest numbers; the first of equals."""
    words, numbers = _said(text)
    found = [(one, *_said(repr(of(one)))) for one in candidates]
    alike = [(_distance(numbers, others), one) for one, theirs, others in found if theirs == words]
    return min(alike, key=lambda pair: pair[0])[1] if alike else None


@lru_cache(1 << 14)
def _said(text: str) -> Said:
    return _NUMBER.sub("#", text), tuple(map(float, _NUMBER.findall(text)))


def _distance(numbers: Iterable[float], others: Iterable[float]) -> float:
    return sum(abs(math.log((a + 1) / (b + 1))) for a, b in zip(numbers, others, strict=True) if a != b)
