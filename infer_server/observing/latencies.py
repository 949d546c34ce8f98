"""Quantiles of durations within the last minute, with constant memory and little work for each duration.

Durations are counted in buckets whose bounds are powers of two divided by 16, so that no bucket is wider than 1/16 of
its durations. Two half windows are kept; the older one is dropped when the newer one is full.
"""
from __future__ import annotations

from collections.abc import Sequence

_HALF_NS = 30_000_000_000
_BITS = 4                   # bits of a duration after the leading one that select the bucket


class Latencies:
    """Histogram of recent durations. Not thread-safe."""

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._since_ns = 0

    def add(self, times_ns: Sequence[int], count: int, now_ns: int) -> None:
        """Count each of these durations `count` times."""
        if now_ns - self._since_ns > _HALF_NS:
            self._turn(now_ns)
        recent = self._recent
        if len(times_ns) > 2 and (bucket := _bucket(min(times_ns))) == _bucket(max(times_ns)):
            recent[bucket] = recent.get(bucket, 0) + count * len(times_ns)      # the common case within a batch
            return
        for ns in times_ns:
            bucket = _bucket(ns)
            recent[bucket] = recent.get(bucket, 0) + count

    def quantiles(self, levels: Sequence[float], now_ns: int) -> list[float]:
        """Return the quantiles in ns at ascending levels between 0 and 1; NaN if there are no durations."""
        if now_ns - self._since_ns > _HALF_NS:
            self._turn(now_ns)
        buckets = sorted(self._recent.keys() | self._before.keys())
        counts = [self._recent.get(bucket, 0) + self._before.get(bucket, 0) for bucket in buckets]
        if not (total := sum(counts)):
            return [float("nan")] * len(levels)
        found, at, below = [], 0, 0
        for level in levels:
            while at < len(buckets) - 1 and below + counts[at] < level * total:
                below += counts[at]
                at += 1
            found.append(_middle(buckets[at]))
        return found

    def _turn(self, now_ns: int) -> None:
        gap = now_ns - self._since_ns > 2 * _HALF_NS
        self._before, self._recent, self._since_ns = {} if gap else self._recent, {}, now_ns


def _bucket(ns: int) -> int:
    shift = ns.bit_length() - 1 - _BITS
    return ns if shift <= 0 else (shift << _BITS) + (ns >> shift)


def _middle(bucket: int) -> float:
    if bucket < 2 << _BITS:
        return float(bucket)
    shift = (bucket >> _BITS) - 1
    low = bucket - (shift << _BITS)
    return (low + 0.5) * (1 << shift)
