"""Quantiles of durations within the last minute, with constant memory and little work for each duration.

Durations are counted in buckets whose bounds are powers of two divided by 16, so that no bucket is wider than 1/16 of
its durations. Two half windows are kept; the older one is dropped when the newer one is full.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

_HALF_NS = 30_000_000_000
_BITS = 4                   # bits of a duration after the leading one that select the bucket
_MANY = 32                  # number of durations from which numpy is faster


class Latencies:
    """Histogram of recent durations. Not thread-safe."""

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._since_ns = 0

    def add(self, times_ns: Sequence[int], now_ns: int, counts: Iterable[int] = itertools.repeat(1)) -> None:
        """Count each duration `counts` times."""
        if now_ns - self._since_ns > _HALF_NS:
            self._turn(now_ns)
        recent = self._recent
        for bucket, count in zip(_buckets(times_ns), counts, strict=False):
            recent[bucket] = recent.get(bucket, 0) + count

    def quantiles(self, levels: Sequence[float], now_ns: int) -> list[float]:
        """Return the quantiles in ns at ascending levels between 0 and 1; NaN if there are no durations."""
        if now_ns - self._since_ns > _HALF_NS:
            self._turn(now_ns)
        buckets = sorted(self._recent.keys() | self._before.keys())
        counts = [self._recent.get(bucket, 0) + self._before.get(bucket, 0) for bucket in buckets]
        if not (total := sum(counts)):
            return [float("nan")] * len(levels)
        values, at, below = [], 0, 0
        for level in levels:
            while at < len(buckets) - 1 and below + counts[at] < level * total:
                below += counts[at]
                at += 1
            values.append(_middle(buckets[at]))
        return values

    def _turn(self, now_ns: int) -> None:
        gap = now_ns - self._since_ns > 2 * _HALF_NS
        self._before, self._recent, self._since_ns = {} if gap else self._recent, {}, now_ns


def _buckets(times_ns: Sequence[int]) -> Iterable[int]:
    if len(times_ns) < _MANY:
        return map(_bucket, times_ns)
    times = np.array(times_ns)
    shifts = np.maximum(np.frexp(times)[1] - 1 - _BITS, 0)          # exponents are exact up to 2 ** 53 ns
    buckets: list[int] = ((shifts << _BITS) + (times >> shifts)).tolist()
    return buckets


def _bucket(ns: int) -> int:
    shift = ns.bit_length() - 1 - _BITS
    return ns if shift <= 0 else (shift << _BITS) + (ns >> shift)


def _middle(bucket: int) -> float:
    if bucket < 2 << _BITS:
        return float(bucket)
    shift = (bucket >> _BITS) - 1
    low = bucket - (shift << _BITS)
    return (low + 0.5) * (1 << shift)
