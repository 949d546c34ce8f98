"""Estimate how long batches take, from measured times of each batch size.

The time of a batch runs from leaving the queue until its responses are handed to the endpoint. The last few times of
each size are kept and summarised by order statistics, which, unlike a mean, ignore a single outlier on a busy machine.
"""
from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

_WINDOW = 16                            # times kept for each size
_SAFE_QUANTILE = 0.9                    # quantile of the safe estimate: excludes the slowest time of a full window
_CLIENT_FACTOR = 9 / 8                  # safety factor for the way to the client, which cannot be measured here
_FRESH_NS = 5_000_000_000               # validity of an estimate after the last measurement, or ...
_FRESH_BATCHES = 10                     # ... the time of this many batches, if that is longer
_COMPUTE_NS = 50_000                    # limit of the compute time of a short batch: about two thread switches
_TOTAL_NS = 500_000                     # limit of the total time of a short batch, which blocks the event loop
_FEW_CORES = 2                          # cores up to which _COMPUTE_NS is the limit of an item, and the total's is ...
_TOTAL_FEW_CORES_NS = 1_000_000         # ... this
_OUTLIER_LIMITS = 4                     # a sample counts as at most this many limits, against outliers
_WEIGHT = 1 / 8                         # weight of a new sample in a moving mean
_MAX_SIZES = 1024                       # batch sizes that are tracked separately
_SAMPLES = 6                            # times per item kept for each size class of AdaptiveBatchLimit
_EVIDENCE = 2                           # samples that a size class needs before it counts
_TOLERANCE = 1.05                       # a smaller batch within this factor of the least time per item is preferred
_BATCH_OVERHEAD_NS = 100_000            # unmeasured cost of a batch: waking a thread and the event loop
_CHEAP_TRIAL_NS = 50_000_000            # time that an untested batch may take; longer ones are tested class by class
_TRIAL_SHARE = 1 / 500                  # share of the instances' time that may be spent on trials


def size_bucket(items: int, sizes: Collection[int]) -> int:
    """Return the size under which a batch of `items` is counted, given the sizes counted so far.

    Beyond a limit on the number of sizes, which split requests can reach, new sizes are rounded up to a power of two.
    """
    return items if items in sizes or len(sizes) < _MAX_SIZES else 1 << (items - 1).bit_length()


class TimeEstimate(NamedTuple):
    """Estimated time of a batch in nanoseconds."""
    likely: float                       # median: with less time left, a request is more likely late than not
    safe: float                         # time within which almost every batch is answered


UNKNOWN = TimeEstimate(0, 0)


class BatchTimes:
    """Time estimates by batch size, linear between and beyond the measured sizes and non-decreasing in size.

    An estimate without a recent measurement is UNKNOWN: requests are refused because of these estimates, and if all
    were refused, nothing would be measured any more and one slow period would refuse requests for ever.
    """

    def __init__(self) -> None:
        self.longest_ns = 0                                 # longest time of any batch so far
        self._times: dict[int, deque[int]] = {}             # times in ns by size, newest last
        self._new: set[int] = set()                         # sizes with times that are not in the estimates yet
        self._measured: dict[int, TimeEstimate] = {}            # estimate of each size by itself
        self._measured_ns = 0                               # time of the last measurement
        self._sizes: list[int] = []                         # measured sizes, ascending
        self._estimates: list[TimeEstimate] = []                # non-decreasing estimates of these sizes

    def add(self, items: int, ns: int, now_ns: int) -> None:
        """Record that a batch of `items` took `ns` nanoseconds."""
        size = size_bucket(items, self._times)
        times = self._times.get(size)
        if times is None:
            times = self._times[size] = deque(maxlen=_WINDOW)
        times.append(ns if size == items else ns * size // items)
        if ns > self.longest_ns:
            self.longest_ns = ns
        self._new.add(size)
        self._measured_ns = now_ns

    def estimate(self, items: int, now_ns: int) -> TimeEstimate:
        """Return the estimated time of a batch of `items`, or UNKNOWN."""
        if not self._times:
            return UNKNOWN
        if self._new:
            self._tabulate()
        if now_ns - self._measured_ns > max(_FRESH_NS, _FRESH_BATCHES * self._estimates[-1].safe):
            return UNKNOWN
        return self._between(items, bisect_left(self._sizes, items))

    def _between(self, items: int, index: int) -> TimeEstimate:
        """Interpolate; `index` is that of the smallest measured size of at least `items`."""
        if index == len(self._sizes):
            last, share = self._estimates[-1], items / self._sizes[-1]
            return TimeEstimate(last.likely * share, last.safe * share)
        above = self._estimates[index]
        if index == 0:
            return above
        below, size_below = self._estimates[index - 1], self._sizes[index - 1]
        share = (items - size_below) / (self._sizes[index] - size_below)
        return TimeEstimate(below.likely + share * (above.likely - below.likely),
                        below.safe + share * (above.safe - below.safe))

    def _tabulate(self) -> None:
        for size in self._new:
            times = sorted(self._times[size])
            self._measured[size] = TimeEstimate(times[len(times) // 2],
                                            times[int(len(times) * _SAFE_QUANTILE)] * _CLIENT_FACTOR)
        self._new.clear()
        self._sizes = sorted(self._times)
        self._estimates = []
        larger = self._measured[self._sizes[-1]]
        for size in reversed(self._sizes):
            own = self._measured[size]
            if own.likely > larger.likely or own.safe > larger.safe:
                own = TimeEstimate(min(own.likely, larger.likely), min(own.safe, larger.safe))
            larger = own
            self._estimates.append(own)
        self._estimates.reverse()


class AdaptiveBatchLimit:
    """Limit of the batch size: the smallest size whose time per item is within 5 % of the best one measured.

    Sizes are grouped into classes (1, 2, 3-4, 5-8, ..., max_batch), and the last few times per item of each class are
    kept. If a larger batch saves no time, the requests beyond the limit go to instances that are idle now or soon.

    While the largest measured class is the best, batches may be larger: up to max_batch, as in Triton, or to the next
    class if a batch of max_batch would take long. Only one batch of an untested class is executed at a time.

    Load changes the cost of a batch, and classes beyond the limit are not measured. Therefore a neighbouring class is
    tried from time to time, for at most a 500th of the instances' time.
    """

    def __init__(self, max_batch: int, instances: int = 1) -> None:
        self.limit = max_batch                              # current limit in items
        self._tops = [*(1 << i for i in range((max_batch - 1).bit_length())), max_batch]    # largest size of each class
        self._instances = instances
        self._times = [deque[float](maxlen=_SAMPLES) for _ in self._tops]       # ns per item, the newest last
        self._known: dict[int, float] = {}                  # median ns per item by class, with enough samples
        self._measured_ns = [0] * len(self._tops)           # time of the newest sample of each class
        self._per_item = 0.0                                # ns per item of the chosen class; 0 if unknown
        self._tested = len(self._tops) - 1                  # largest tested class
        self._testing_until_ns = 0                          # until then a batch of an untested class is executing
        self._trial = max_batch                             # size of the next trial
        self._trial_ns = 0                                  # earliest time of the next trial

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

    def current_limit(self, now_ns: int) -> int:
        """Return the number of items that a batch may have now: the limit, or the size of a trial that is due."""
        if now_ns < self._testing_until_ns:
            return self._tops[self._tested]
        return self._trial if self._per_item and now_ns >= self._trial_ns else self.limit

    def record_start(self, items: int, now_ns: int) -> None:
        """Record that a batch of `items` begins to execute, which may be a trial of its class."""
        index = self._class_of(items)
        if index > self._tested:
            self._testing_until_ns = now_ns + int(2 * items * self._per_item)
        elif now_ns >= self._trial_ns and self._tops[index] == self._trial != self.limit:
            self._trial_ns = now_ns + self._pause_ns(items)

    def _pause_ns(self, items: int) -> int:
        """Return the pause in ns after a trial of `items`."""
        return int(items * self._per_item / _TRIAL_SHARE / self._instances)

    def _next_trial(self) -> int:
        """Return the size to try next: of the candidates, the one that was measured longest ago.

        Candidates are the classes next to the limit, and larger ones of which a batch is short. The limit itself is
        returned while larger classes are untested.
        """
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
    """Decide which batches of a model may execute on the event loop.

    These are batches that an engine computes in less time than it takes to hand them to another thread. Copying inputs
    and encoding outputs hold the interpreter lock on any thread, so that the event loop waits for them anyway; but the
    total must not block it for long.

    On few cores, the event loop and the clients or the network keep them busy. A thread that executes small items then
    gains less than it costs by switches and by waiting for the interpreter lock, so that longer batches are short.
    """

    def __init__(self, max_batch: int, cores: int = _FEW_CORES + 1) -> None:
        """Record batches of up to `max_batch` items; `cores` is the number of cores that this process may use."""
        is_few = cores <= _FEW_CORES
        self._computing = _Means(max_batch, _COMPUTE_NS, by_item=is_few)
        self._whole = _Means(max_batch, _TOTAL_FEW_CORES_NS if is_few else _TOTAL_NS)

    def add(self, items: int, computing_ns: int, whole_ns: int) -> None:
        """Record the compute time and the total time of a batch of `items`."""
        self._computing.add(items, computing_ns)
        self._whole.add(items, whole_ns)

    def is_short(self, items: int) -> bool:
        """Return True if a batch of `items` is short. See `_Means` for sizes that were not measured."""
        return self._computing.within_limit(items) and self._whole.within_limit(items)


class _Means:
    """Moving means of times by batch size, compared with a limit of a batch, or of an item of it (`by_item`).

    A size that was not measured is assumed to take no longer than the largest size does, and no longer for each item
    than a measured size of at least half of it: a single slow measurement of the largest size must not count for ever.
    """

    def __init__(self, max_batch: int, limit_ns: int, by_item: bool = False) -> None:
        self._ns = [0.0] * (max_batch + 1)                  # mean by size; 0 if not measured
        self._limits_ns = [limit_ns * (max(1, items) if by_item else 1) for items in range(max_batch + 1)]

    def add(self, items: int, ns: int) -> None:
        if items < len(self._ns):
            known = self._ns[items] or ns
            self._ns[items] = known + _WEIGHT * (min(ns, _OUTLIER_LIMITS * self._limits_ns[items]) - known)

    def within_limit(self, items: int) -> bool:
        return items < len(self._ns) and 0 < (self._ns[items] or self._bound_ns(items)) <= self._limits_ns[items]

    def _bound_ns(self, items: int) -> float:
        """Return an upper bound of the time of a size that was not measured; 0 if there is none."""
        largest_ns = self._ns[-1]
        if largest_ns > self._limits_ns[items]:
            for size in range(items - 1, (items - 1) // 2, -1):
                if self._ns[size]:
                    return min(largest_ns, self._ns[size] * items / size)
        return largest_ns
