"""Cost model of tactics, to drop hopeless ones before timing, and to choose where nothing can be timed.

A current core issues about four vector instructions in a cycle, two of them products, with two loads and one store. The
largest of these counts is the time of a piece of code. Traffic from L2 and beyond is added, as far as arithmetic does
not hide it. Weights are first read from beyond L2, because all others of the network were read in between. For the
accuracy of costs run `python -m benchmarks.costs`.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

LATENCY = 4             # latency of a multiply-add, in cycles
CALL = 12               # cycles to enter and leave a micro-kernel and its loops
CONGESTION = 5          # power of the mean of limits; with 5, two equal limits take 15 % longer than one
FIRST_LEVEL = 24 << 10  # bytes that stay in L1 while other data stream through it
SECOND_LEVEL = 384 << 10
LINE, SET_SPAN, WAYS = 64, 4096, 8      # L1: bytes of a line; distance of lines in one set, in bytes; lines of a set
CYCLES_PER_BYTE_L2, CYCLES_PER_BYTE_BEYOND = 1 / 48, 1 / 16
EXPOSED_SHARE = 0.3     # share of a read's time that arithmetic does not hide
FIRST_SHARE, AHEAD_SHARE = 0.6, 0.1     # that share for the first read of weights, without and with prefetch


@dataclass(frozen=True)
class Work:
    """Vector instructions of a piece of code."""
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
        """Return the cycles in a dense loop, where a second limit close to the largest one adds to the time."""
        return float(sum(limit ** CONGESTION for limit in self._limits) ** (1 / CONGESTION))

    @property
    def _limits(self) -> tuple[float, ...]:
        return self.products / 2, (self.products + self.others) / 4, self.loads / 2, self.stores


def epilogue(instructions: int, operands: int, vectors: int, pixels: int) -> Work:
    """Return the work of a program on one vector of a pixel's sums, stored as u8: conversions, and a share of packs.

    Packs take four vectors at a time, from as many pixels as are available.
    """
    shuffles = 3 / min(4, vectors * pixels) + (1 / vectors if vectors < 4 else 0)
    return Work(instructions, 2 + shuffles + 2 * operands, operands, 1 / vectors)


def reading(size: float, times: float = 1) -> float:
    """Return the cycles by which reading `size` bytes `times` times delays the arithmetic, which hides most of them."""
    if size <= FIRST_LEVEL:
        return 0.0
    return EXPOSED_SHARE * size * times * (CYCLES_PER_BYTE_L2 if size <= SECOND_LEVEL else CYCLES_PER_BYTE_BEYOND)


def pushed_out(rows: int, pitch: int) -> float:
    """Return the cycles of cache misses if each of so many rows is read in parts of a line, again and again.

    If more rows share a set of L1 than it has ways, the lines are evicted before their next parts are read.
    """
    if rows * math.gcd(pitch, SET_SPAN) <= WAYS * SET_SPAN:
        return 0.0
    return EXPOSED_SHARE * rows * LINE * CYCLES_PER_BYTE_L2


def first_reading(size: float, prefetched: bool = False) -> float:
    """Return the cycles by which the first read of so many bytes of weights delays the arithmetic."""
    return (AHEAD_SHARE if prefetched else FIRST_SHARE) * size * CYCLES_PER_BYTE_BEYOND


def pieces(extent: int, step: int) -> list[tuple[int, int]]:
    """Return (size, number of pieces) for each size of piece that `extent` is divided into."""
    whole, rest = divmod(extent, step)
    return [(size, count) for size, count in ((step, whole), (rest, 1)) if size and count]
