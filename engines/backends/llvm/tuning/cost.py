"""What a tactic costs, roughly: to drop the hopeless before timing, and to choose where nothing can be timed.

A core of today issues, in a cycle, about four vector instructions, two of them products, with two loads and one store.
The largest of these counts is the time of a stretch of code; what it takes from the second level of cache and from
beyond comes on top, as far as it does not hide behind the arithmetic. Weights come from beyond, the first time: since
they were last read, all others of the network were. How far costs are from times: `python -m benchmarks.costs`.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

LATENCY = 4             # cycles from a product to the next one on the same sum
CALL = 12               # cycles to enter and leave a micro-kernel and its loops
CONGESTION = 5          # power of the mean of limits: at 5, two of the same height take 15 % longer than one
FIRST_LEVEL = 24 << 10  # bytes that stay in the first level beside what streams through
SECOND_LEVEL = 384 << 10
LINE, SET_SPAN, WAYS = 64, 4096, 8      # bytes of a line of the first level; lines so many bytes apart share one of its
                                        # sets, and so many of them a set holds
CYCLES_PER_BYTE_L2, CYCLES_PER_BYTE_BEYOND = 1 / 48, 1 / 16
EXPOSED_SHARE = 0.3     # of the time of a read, what arithmetic does not hide
FIRST_SHARE, AHEAD_SHARE = 0.6, 0.1     # the same of weights that come from beyond; and where they were prefetched


@dataclass(frozen=True)
class Work:
    """Vector instructions of a stretch of code."""
    products: float = 0         # multiply-adds: two a cycle
    others: float = 0           # shuffles, conversions, sums
    loads: float = 0
    stores: float = 0

    def __add__(self, more: Work) -> Work:
        return Work(self.products + more.products, self.others + more.others, self.loads + more.loads,
                    self.stores + more.stores)

    def __mul__(self, times: float) -> Work:
        return Work(self.products * times, self.others * times, self.loads * times, self.stores * times)

    @property
    def cycles(self) -> float:
        return max(self._limits)

    @property
    def congested_cycles(self) -> float:
        """The same of a dense loop: where another limit is near the largest, the two get in each other's way."""
        return float(sum(limit ** CONGESTION for limit in self._limits) ** (1 / CONGESTION))

    @property
    def _limits(self) -> tuple[float, ...]:
        return self.products / 2, (self.products + self.others) / 4, self.loads / 2, self.stores


def epilogue(instructions: int, operands: int, vectors: int, pixels: int) -> Work:
    """A program on one of a pixel's vectors of sums, stored as u8: conversions, and its share of packs and shuffles.

    Packs take four vectors at a time: of as many pixels as are at hand.
    """
    shuffles = 3 / min(4, vectors * pixels) + (1 / vectors if vectors < 4 else 0)
    return Work(instructions, 2 + shuffles + 2 * operands, operands, 1 / vectors)


def reading(size: float, times: float = 1) -> float:
    """Cycles by which reading `size` bytes so many times delays the arithmetic, which hides most of them."""
    if size <= FIRST_LEVEL:
        return 0.0
    return EXPOSED_SHARE * size * times * (CYCLES_PER_BYTE_L2 if size <= SECOND_LEVEL else CYCLES_PER_BYTE_BEYOND)


def pushed_out(rows: int, pitch: int) -> float:
    """Cycles by which reading a part of a line of each of so many rows delays the arithmetic, again and again: where
    more rows share a set of the first level than it holds, none is there when its next part is read."""
    if rows * math.gcd(pitch, SET_SPAN) <= WAYS * SET_SPAN:
        return 0.0
    return EXPOSED_SHARE * rows * LINE * CYCLES_PER_BYTE_L2


def first_reading(size: float, prefetched: bool = False) -> float:
    """Cycles by which so many bytes of weights delay the arithmetic when it meets them first."""
    return (AHEAD_SHARE if prefetched else FIRST_SHARE) * size * CYCLES_PER_BYTE_BEYOND


def pieces(extent: int, step: int) -> list[tuple[int, int]]:
    """(size, how many) of the pieces that `extent` is cut into."""
    whole, rest = divmod(extent, step)
    return [(size, count) for size, count in ((step, whole), (rest, 1)) if size and count]
