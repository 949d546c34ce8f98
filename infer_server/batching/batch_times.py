"""How long a batch takes, as measured: a running estimate for each batch size.

The time of a batch is that from leaving the queue to its answers being handed to the endpoint. Of each size the last
few times are kept; order statistics of them are not moved by the one batch that met a busy machine, as a mean would be.
"""
from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

_WINDOW = 16                            # times of each size that count
_SAFE_QUANTILE = 0.9                    # all but the slowest one of a full window
_ON_THE_WAY = 9 / 8                     # an answer still has to reach its client, which nothing here can measure
_FRESH_NS = 5_000_000_000               # for so long an estimate stands unconfirmed, or ...
_FRESH_BATCHES = 10                     # ... for the time of so many batches, if that is longer
_SHORT_NS = 50_000                      # of computing: about what it takes to wake a thread, and to be woken by it
_HELD_NS = 500_000                      # of all that a batch takes: for so long nothing else is read or sent
_MOST = 4                               # limits that one time counts, for a busy machine makes any of them long
_WEIGHT = 1 / 8                         # of a new time
_MOST_SIZES = 1024                      # of batches that are told apart


def counted_as(items: int, sizes: Collection[int]) -> int:
    """The size under which a batch of `items` is counted, beside those of `sizes`. Requests that are cut have any
    number of items: where there are too many sizes, a new one is the next power of two."""
    return items if items in sizes or len(sizes) < _MOST_SIZES else 1 << (items - 1).bit_length()


class Estimate(NamedTuple):
    """An estimate of the time of a batch, in ns."""
    likely: float                       # half of them need no longer: with less time, being late is the rule
    safe: float                         # almost every one is answered within it


UNKNOWN = Estimate(0, 0)


class BatchTimes:
    """Between and beyond the sizes measured, estimates are linear; no batch is said to take longer than a larger one.

    An estimate that is not fresh is UNKNOWN. Requests are refused because of these estimates, and where all are refused
    nothing is measured any more: without an end to its validity, one slow moment would close the model for ever.
    """

    def __init__(self) -> None:
        self.longest_ns = 0                                 # that any batch ever took: nobody with more time is late
        self._times: dict[int, deque[int]] = {}             # items -> ns, the newest last
        self._new: set[int] = set()                         # sizes whose estimates are older than their times
        self._measured: dict[int, Estimate] = {}            # of each size by itself
        self._measured_ns = 0                               # when the newest of all was
        self._sizes: list[int] = []                         # those measured, ascending
        self._estimates: list[Estimate] = []                # one for each

    def add(self, items: int, ns: int, now_ns: int) -> None:
        """A batch of `items` took `ns`."""
        size = counted_as(items, self._times)
        kept = self._times.get(size)
        if kept is None:
            kept = self._times[size] = deque(maxlen=_WINDOW)
        kept.append(ns if size == items else ns * size // items)
        if ns > self.longest_ns:
            self.longest_ns = ns
        self._new.add(size)
        self._measured_ns = now_ns

    def estimate(self, items: int, now_ns: int) -> Estimate:
        """How long a batch of so many items takes."""
        if not self._times:
            return UNKNOWN
        if self._new:
            self._tabulate()
        if now_ns - self._measured_ns > max(_FRESH_NS, _FRESH_BATCHES * self._estimates[-1].safe):
            return UNKNOWN
        return self._between(items, bisect_left(self._sizes, items))

    def _between(self, items: int, index: int) -> Estimate:
        """`index`: of the smallest size measured that holds `items`."""
        if index == len(self._sizes):
            last, share = self._estimates[-1], items / self._sizes[-1]
            return Estimate(last.likely * share, last.safe * share)
        above = self._estimates[index]
        if index == 0:
            return above
        below, size_below = self._estimates[index - 1], self._sizes[index - 1]
        share = (items - size_below) / (self._sizes[index] - size_below)
        return Estimate(below.likely + share * (above.likely - below.likely),
                        below.safe + share * (above.safe - below.safe))

    def _tabulate(self) -> None:
        for size in self._new:
            times = sorted(self._times[size])
            self._measured[size] = Estimate(times[len(times) // 2],
                                            times[int(len(times) * _SAFE_QUANTILE)] * _ON_THE_WAY)
        self._new.clear()
        self._sizes = sorted(self._times)
        self._estimates = []
        larger = self._measured[self._sizes[-1]]
        for size in reversed(self._sizes):
            own = self._measured[size]
            if own.likely > larger.likely or own.safe > larger.safe:
                own = Estimate(min(own.likely, larger.likely), min(own.safe, larger.safe))
            larger = own
            self._estimates.append(own)
        self._estimates.reverse()


class ShortBatches:
    """Which batches of a model the event loop may execute.

    An engine computes them in less time than it takes to hand them to another thread. Copying inputs and encoding
    outputs take the interpreter lock on whatever thread, so that the loop would wait for them there, too; but with them
    a batch must not hold it up for long.
    """

    def __init__(self, max_batch: int) -> None:
        self._computing, self._whole = _Means(max_batch, _SHORT_NS), _Means(max_batch, _HELD_NS)

    def add(self, items: int, computing_ns: int, whole_ns: int) -> None:
        """Of a batch of `items`."""
        self._computing.add(items, computing_ns)
        self._whole.add(items, whole_ns)

    def holds(self, items: int) -> bool:
        """Whether it is one of so many items. A size that was not measured takes no longer than the largest."""
        return self._computing.are_within(items) and self._whole.are_within(items)


class _Means:
    """Moving means of times, by items, against a limit."""

    def __init__(self, max_batch: int, limit_ns: int) -> None:
        self._ns = [0.0] * (max_batch + 1)                  # 0: not measured
        self._limit_ns = limit_ns

    def add(self, items: int, ns: int) -> None:
        if items < len(self._ns):
            known = self._ns[items] or ns
            self._ns[items] = known + _WEIGHT * (min(ns, _MOST * self._limit_ns) - known)

    def are_within(self, items: int) -> bool:
        return items < len(self._ns) and 0 < (self._ns[items] or self._ns[-1]) <= self._limit_ns
