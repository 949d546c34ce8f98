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
_SAMPLES = 6                            # times per item kept for each size class of PayingBatch
_EVIDENCE = 2                           # samples that a size class needs before it counts
_TOLERANCE = 1.05                       # times the least time per item: a smaller batch within it is preferred
_BATCH_OVERHEAD_NS = 100_000            # per batch, outside of what is measured: waking a thread and the event loop
_CHEAP_TRIAL_NS = 50_000_000            # an untested batch may take so long; a longer one is tested class by class
_TRIAL_SHARE = 1 / 500                  # of an instance's time that may be spent on trials


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


class PayingBatch:
    """The largest batch worth taking: the smallest size whose time per item is within 5 % of the best one measured.

    Sizes are grouped into classes (1, 2, 3-4, 5-8, ..., max_batch), and the last few times per item of each class are
    kept. Where a larger batch saves no time, the requests beyond the limit go to instances that are idle now or a
    moment later.

    As long as the largest class measured pays, batches may be larger: up to max_batch, as in Triton, or to the next
    class where a batch of max_batch would take long. Only one batch of an untested class is executed at a time.

    Load changes what a batch costs, and a class beyond the limit is no longer measured. Therefore a neighbouring class
    is tried now and then, for at most a 500th of the instances' time.
    """

    def __init__(self, max_batch: int, instances: int = 1) -> None:
        self.limit = max_batch                              # items
        self._tops = [*(1 << i for i in range((max_batch - 1).bit_length())), max_batch]    # largest size of each class
        self._instances = instances
        self._times = [deque[float](maxlen=_SAMPLES) for _ in self._tops]       # ns per item, the newest last
        self._known: dict[int, float] = {}                  # class -> median ns per item, of those with enough samples
        self._measured_ns = [0] * len(self._tops)           # when the newest sample of each was added
        self._per_item = 0.0                                # ns, of the least class that pays; 0: not known
        self._tested = len(self._tops) - 1                  # larger classes may pay, but have not been measured
        self._testing_until_ns = 0                          # a batch of such a class is in execution
        self._trial = max_batch                             # the size to be tried next
        self._trial_ns = 0                                  # not before then

    def add(self, items: int, ns: int, now_ns: int) -> None:
        """Record that a batch of `items` took `ns`."""
        index = self._class_of(items)
        times = self._times[index]
        times.append((ns + _BATCH_OVERHEAD_NS) / items)
        self._measured_ns[index] = now_ns
        if index > self._tested:
            self._testing_until_ns = 0
        if len(times) < _EVIDENCE:
            return
        known, is_first = self._known, not self._known
        known[index] = sorted(times)[(len(times) - 1) // 2]
        best = min(known.values()) * _TOLERANCE
        smallest, largest, last = min(i for i in known if known[i] <= best), max(known), len(self._tops) - 1
        self._per_item = known[smallest]
        if smallest < largest:
            self._tested, self.limit = last, self._tops[smallest]
        else:
            self._tested, self.limit = largest, self._tops[last if self._is_cheap(last) else min(largest + 1, last)]
        if is_first:
            self._trial_ns = now_ns + self._pause_ns(items)
        self._trial = self._next_trial()

    def most(self, now_ns: int) -> int:
        """Return the number of items that a batch may have now: the limit, or the size that is due for a trial."""
        if now_ns < self._testing_until_ns:
            return self._tops[self._tested]
        return self._trial if self._per_item and now_ns >= self._trial_ns else self.limit

    def taken(self, items: int, now_ns: int) -> None:
        """Note that a batch of `items` is executed, which may be a test or a trial of its class."""
        index = self._class_of(items)
        if index > self._tested:
            self._testing_until_ns = now_ns + int(2 * items * self._per_item)
        elif now_ns >= self._trial_ns and self._tops[index] == self._trial != self.limit:
            self._trial_ns = now_ns + self._pause_ns(items)

    def _pause_ns(self, items: int) -> int:
        """Return the time from a trial of `items` to the next one."""
        return int(items * self._per_item / _TRIAL_SHARE / self._instances)

    def _next_trial(self) -> int:
        """Return the size that was not measured for the longest time: the class below the limit, the one above, or a
        larger one if a batch of it is short. It is the limit itself while larger classes are untested."""
        at, last = self._tops.index(self.limit), len(self._tops) - 1
        if self._tested < last:
            return self.limit
        near = [i for i in range(last + 1) if abs(i - at) == 1 or (i > at and self._is_cheap(i))]
        return self._tops[min(near, key=lambda i: self._measured_ns[i])] if near else self.limit

    def _is_cheap(self, index: int) -> bool:
        return self._tops[index] * self._per_item <= _CHEAP_TRIAL_NS

    def _class_of(self, items: int) -> int:
        return min(bisect_left(self._tops, items), len(self._tops) - 1)


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
