"""Decide when to execute a batch and of which requests: pure functions of queue, clock, policy and measured times.

Without deadlines the rules are Triton's (core/src/dynamic_batch_scheduler.cc, GetDynamicBatch; scheduler_utils.cc,
ApplyPolicy). Triton's queue does not know clients' deadlines: under overload it executes, first come first served,
requests that are answered too late, and hardly any in time.
"""
from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from infer_server.batching.batch_times import BatchTimes


class Queued(Protocol):
    """Properties of a waiting request that a decision depends on."""
    @property
    def items(self) -> int: ...                  # items on the batch axis
    @property
    def shape_key(self) -> Hashable: ...        # only requests with equal keys share a batch
    @property
    def enqueued_ns(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...           # time by which the request must be answered; 0 if there is none


Q = TypeVar("Q", bound=Queued)

_NEVER_NS = 1 << 63
_NO_LIMIT = 1 << 63         # no limit on the items of a batch
_MIN_GAIN = 1.1             # factor by which a smaller batch must be better, because measured times are noisy


@dataclass(frozen=True)
class BatchPolicy:
    """Batching policy: max_batch_size and dynamic_batching of config.pbtxt."""
    max_batch_size: int = 1
    preferred_batch_sizes: frozenset[int] = frozenset()
    max_queue_delay_us: int = 0                 # time that the oldest request may wait for a fuller batch
    merges: bool = True                         # requests share batches; False without dynamic_batching

    @property
    def largest_preferred(self) -> int:
        return max(self.preferred_batch_sizes, default=self.max_batch_size)

    @property
    def is_immediate(self) -> bool:
        """True if neither a preferred size nor a delay determines the batch size."""
        return not self.preferred_batch_sizes and not self.max_queue_delay_us


@dataclass(frozen=True)
class QueuePolicy:
    """Queue policy: default_queue_policy of config.pbtxt."""
    max_queue_size: int = 0                     # limit of the waiting requests; 0 for none
    default_timeout_us: int = 0                 # 0 for none
    allow_timeout_override: bool = False        # requests may set a shorter timeout
    delay_expired: bool = False                 # execute expired requests after all others instead of refusing them

    def timeout_us(self, requested_us: int) -> int:
        """Return the timeout of a request that sets `requested_us`; 0 means none in both."""
        if not self.allow_timeout_override or not requested_us:
            return self.default_timeout_us
        return min(requested_us, self.default_timeout_us or requested_us)


@dataclass(frozen=True)
class Priorities:
    """Priority levels: priority_levels, default_priority_level and priority_queue_policy of dynamic_batching."""
    policies: tuple[QueuePolicy, ...] = (QueuePolicy(),)        # policy of each level, highest priority first
    default: int = 1                            # level of requests without a priority, counted from 1

    def level(self, requested: int) -> int:
        """Return the index of a requested level, or of the default level if there is no such level."""
        return (requested if 1 <= requested <= len(self.policies) else self.default) - 1


@dataclass(frozen=True)
class Send:
    """Decision to execute the first `count` requests of the queue together."""
    count: int


@dataclass(frozen=True)
class Wait:
    """Decision to execute nothing before `until_ns` unless a request arrives."""
    until_ns: int


@dataclass(frozen=True)
class BatchChoice(Generic[Q]):
    """Decision to execute `batch` and to refuse requests that cannot be answered in time. One of them may be empty."""
    batch: list[Q]
    refused: list[Q] = field(default_factory=list)


@dataclass(frozen=True)
class Instances:
    """Instances of a model: the total, and those that are idle besides the one that decides."""
    total: int = 1
    idle: int = 0
    limit: int = _NO_LIMIT      # batch size beyond which the time per item does not fall (AdaptiveBatchLimit)


def decide(queue: Iterable[Queued], now_ns: int, policy: BatchPolicy, idle: int = 0,
           limit: int = _NO_LIMIT) -> Send | Wait:
    """Decide whether an idle instance takes the front of a queue now, and how many requests of it.

    The window for a fuller batch opens when the oldest request arrives. Without max_queue_delay_us there is no window:
    a batch is what gathered while the instance was busy, shared with the `idle` other instances, up to `limit` items.

    Parameters
    ----------
    queue : iterable of Queued
        Waiting requests, oldest first; not empty.
    limit : int
        Batch size beyond which the time per item does not fall (AdaptiveBatchLimit). It has no effect if the policy has
        preferred sizes or a delay, which mean what they mean in Triton. A larger request is executed by itself.
    """
    if not policy.merges:
        return Send(1)
    if policy.is_immediate:
        return Send(count_immediate(queue, policy.max_batch_size, idle, limit))
    largest = policy.largest_preferred
    items = count = 0
    preferred = 0                               # number of requests at the largest preferred size reached
    full = False
    oldest_ns = now_ns
    first_key: Hashable = None
    for request in queue:
        if count == 0:
            first_key = request.shape_key
        else:
            grown = items + request.items
            if not preferred and grown > largest:
                preferred = count               # waiting would skip all preferred sizes
            if grown > policy.max_batch_size or request.shape_key != first_key:
                full = True
                break
        if request.enqueued_ns < oldest_ns:     # with priorities, the oldest need not be the first
            oldest_ns = request.enqueued_ns
        items += request.items
        count += 1
        if items in policy.preferred_batch_sizes:
            preferred = count

    window_ends_ns = oldest_ns + policy.max_queue_delay_us * 1000
    if policy.max_queue_delay_us and now_ns >= window_ends_ns:
        return Send(count)
    if preferred or full or items >= largest or not policy.max_queue_delay_us:
        return Send(preferred or count)
    return Wait(window_ends_ns)


def count_immediate(queue: Iterable[Queued], largest: int, idle: int, limit: int) -> int:
    """Return how many requests an instance takes that waits for no fuller batch.

    Parameters
    ----------
    queue : iterable of Queued
        Waiting requests, oldest first; not empty.
    largest : int
        Maximum batch size in items.
    idle, limit : int
        See `decide`.
    """
    items = count = 0
    within_limit = 0                            # number of requests within `limit` items
    first_key: Hashable = None
    for request in queue:
        items += request.items
        if not count:
            first_key = request.shape_key
        elif items > largest or request.shape_key != first_key:
            break
        count += 1
        if items <= limit:
            within_limit = count
    return max(1, min(share(count, idle), within_limit))


def share(count: int, idle: int) -> int:
    """Return how many of `count` requests an instance takes if `idle` others could take some as well.

    Two small batches on otherwise idle cores are faster than one large batch.
    """
    return -(-count // (1 + idle))


def choose(queue: Collection[Q], now_ns: int, policy: BatchPolicy, instances: Instances, times: BatchTimes
           ) -> BatchChoice[Q] | Wait:
    """Decide what an instance does with a queue of which some requests have deadlines.

    It executes the front of the queue as `decide` says if all of that can be answered in time. Otherwise the batch has
    the size that answers the most items in time per second, and `shed` says which requests are refused. Requests that
    share no batch are judged by their own size.

    Parameters
    ----------
    queue : collection of Queued
        Waiting requests, oldest first; not empty.
    now_ns : int
        Current time in ns.
    policy : BatchPolicy
        Batching policy.
    instances : Instances
        Instances of the model.
    times : BatchTimes
        Measured times of batches.
    """
    decision = decide(queue, now_ns, policy, instances.idle, instances.limit)
    if isinstance(decision, Wait):
        latest_ns = _latest_start_ns(queue, now_ns, times)
        if now_ns < latest_ns:
            return Wait(min(decision.until_ns, latest_ns))
    front = list(islice(queue, decision.count)) if isinstance(decision, Send) else list(queue)
    if now_ns <= _latest_start_ns(front, now_ns, times):
        return BatchChoice(front)
    if policy.merges and front[0].items <= policy.max_batch_size:
        largest = policy.max_batch_size
        if policy.is_immediate:
            largest = min(largest, max(instances.limit, front[0].items))
        estimates = {size: times.estimate(size, now_ns) for size in _halves(largest)}
        for times_ns in ({size: each.safe for size, each in estimates.items()},
                         {size: each.likely for size, each in estimates.items()}):  # requests that may just make it
            size = _best_size(queue, now_ns, times_ns)
            if size:
                kept, refused = shed(queue, size, now_ns + times_ns[size], estimates[size].likely / instances.total)
                return BatchChoice(_in_time(kept, now_ns + times_ns[size], size), refused)
    return _choose_single(front if policy.merges else queue, now_ns, times)


def _choose_single(queue: Iterable[Q], now_ns: int, times: BatchTimes) -> BatchChoice[Q]:
    """Return the first request that is safely answered in time alone, or else the first that is likely to be.

    Requests before it that are late in any case are refused.
    """
    unsafe, refused = list[Q](), list[Q]()
    for request in queue:
        estimate = times.estimate(request.items, now_ns)
        if not request.deadline_ns or now_ns + estimate.safe <= request.deadline_ns:
            return BatchChoice([request], refused)
        (refused if now_ns + estimate.likely > request.deadline_ns else unsafe).append(request)
    return BatchChoice(unsafe[:1], refused)


def shed(queue: Iterable[Q], size: int, done_ns: float, next_ns: float) -> tuple[list[Q], list[Q]]:
    """Divide a queue into the requests that can all be answered in time, and those that must be refused for it.

    Batches of `size` items are executed in the order of arrival; the first is answered at `done_ns`, each other
    `next_ns` after the one before. Whenever a request would be late, the one with the nearest deadline so far is
    refused. This minimises the number of late requests (J. M. Moore, An n Job, One Machine Sequencing Algorithm for
    Minimizing the Number of Late Jobs, Management Science 15, 1968).

    Parameters
    ----------
    queue : iterable of Queued
        Waiting requests, oldest first. Those of more than `size` items are in neither result.
    size : int
        Items of a batch.
    done_ns : float
        Time at which the first batch is answered.
    next_ns : float
        Time between batches in ns.

    Returns
    -------
    kept, refused : list of Queued
        Requests that are answered in time, and refused ones.
    """
    kept: dict[int, Q] = {}                         # by position in the queue
    deadlines: list[tuple[int, int]] = []           # heap of (deadline, position) of the kept requests
    refused = []
    items = 0
    for position, request in enumerate(queue):
        if request.items > size:
            continue                                # not part of such batches: in neither result
        kept[position] = request
        items += request.items
        if not request.deadline_ns:
            continue
        heapq.heappush(deadlines, (request.deadline_ns, position))
        if request.deadline_ns < done_ns + next_ns * ((items - 1) // size):
            late = kept.pop(heapq.heappop(deadlines)[1])
            items -= late.items
            refused.append(late)
    return list(kept.values()), refused


def is_hopeless(request: Queued, now_ns: int, times: BatchTimes) -> bool:
    """Return True if a request is likely to be late even if it is executed at once and alone."""
    if not request.deadline_ns or request.deadline_ns > now_ns + times.longest_ns:
        return False
    return now_ns + times.estimate(request.items, now_ns).likely > request.deadline_ns


def _best_size(queue: Iterable[Queued], now_ns: int, times_ns: Mapping[int, float]) -> int:
    """Return the size of `times_ns` that answers the most items in time per second; 0 if none answers any.

    Of nearly equal sizes the first one wins.
    """
    best, best_rate = 0, 0.0
    for size, ns in times_ns.items():
        rate = _items(_in_time(queue, now_ns + ns, size)) / max(ns, 1)
        if rate > best_rate * _MIN_GAIN:
            best, best_rate = size, rate
    return best


def _in_time(queue: Iterable[Q], done_ns: float, size: int) -> list[Q]:
    """Return the oldest requests, up to `size` items of one shape, that are in time if answered at `done_ns`."""
    batch: list[Q] = []
    items = 0
    for request in queue:
        if 0 < request.deadline_ns < done_ns or request.items > size:
            continue
        if batch and (items + request.items > size or request.shape_key != batch[0].shape_key):
            break
        batch.append(request)
        items += request.items
        if items == size:
            break
    return batch


def _latest_start_ns(batch: Iterable[Queued], now_ns: int, times: BatchTimes) -> int:
    """Return the time by which a batch must start so that all its requests are safely answered in time."""
    batch = list(batch)
    deadlines = [request.deadline_ns for request in batch if request.deadline_ns]
    if not deadlines:
        return _NEVER_NS
    return int(min(deadlines) - times.estimate(_items(batch), now_ns).safe)


def _halves(size: int) -> list[int]:
    """Return `size` and its successive halves down to 1."""
    return [size >> i for i in range(size.bit_length())]


def _items(batch: Iterable[Queued]) -> int:
    return sum(request.items for request in batch)
