"""When to send a batch, and of which requests: pure functions of queue, clock, policy and measured times.

Without deadlines the rules are Triton's (core/src/dynamic_batch_scheduler.cc, GetDynamicBatch; scheduler_utils.cc,
ApplyPolicy). Triton's queue knows nothing of the deadlines of clients: under overload it executes, first come first
served, requests that are answered too late, and hardly any in time.
"""
from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from infer_server.batching.batch_times import BatchTimes


class Queued(Protocol):
    """What a decision needs to know of a waiting request."""
    @property
    def items(self) -> int: ...                  # items on its batch axis
    @property
    def shape_key(self) -> Hashable: ...        # requests of unequal keys never share a batch
    @property
    def enqueued_ns(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...           # by which it must be answered; 0: its client waits for ever


Q = TypeVar("Q", bound=Queued)

_NEVER_NS = 1 << 63
_ANY = 1 << 63              # items of a batch: no limit
_BETTER = 1.1               # how much better a smaller batch must be: the times are measured, and noisy


@dataclass(frozen=True)
class BatchPolicy:
    """How requests are put together; the fields of config.pbtxt's max_batch_size and dynamic_batching."""
    max_batch_size: int = 1
    preferred_batch_sizes: frozenset[int] = frozenset()
    max_queue_delay_us: int = 0                 # how long the oldest request may wait for a fuller batch
    merges: bool = True                         # requests share a batch; without dynamic_batching each has its own

    @property
    def largest_preferred(self) -> int:
        return max(self.preferred_batch_sizes, default=self.max_batch_size)

    @property
    def takes_what_waits(self) -> bool:
        """True if no preferred size and no delay decides how large a batch is."""
        return not self.preferred_batch_sizes and not self.max_queue_delay_us


@dataclass(frozen=True)
class QueuePolicy:
    """How long requests wait and how many may; the fields of config.pbtxt's default_queue_policy."""
    max_queue_size: int = 0                     # requests; 0: no limit
    default_timeout_us: int = 0                 # 0: none
    allow_timeout_override: bool = False        # a request may ask for a shorter timeout
    delay_expired: bool = False                 # expired requests go behind all others, instead of being refused

    def timeout_us(self, requested_us: int) -> int:
        """The timeout of a request that asks for `requested_us`; 0 is none, here as there."""
        if not self.allow_timeout_override or not requested_us:
            return self.default_timeout_us
        return min(requested_us, self.default_timeout_us or requested_us)


@dataclass(frozen=True)
class Priorities:
    """The levels of a queue: dynamic_batching's priority_levels, default_priority_level and priority_queue_policy."""
    policies: tuple[QueuePolicy, ...] = (QueuePolicy(),)        # of each level, the highest priority first
    default: int = 1                            # the level of a request that asks for none, counted from 1

    def level(self, requested: int) -> int:
        """The index of the level of a request that asks for `requested`; where there is none, it is the default."""
        return (requested if 1 <= requested <= len(self.policies) else self.default) - 1


@dataclass(frozen=True)
class Send:
    """Execute the first `count` requests of the queue together."""
    count: int


@dataclass(frozen=True)
class Wait:
    """Nothing to execute before `until_ns`, unless a request arrives."""
    until_ns: int


@dataclass(frozen=True)
class BatchChoice(Generic[Q]):
    """Execute `batch` together and refuse `lost`, which cannot be answered in time. One of them may be empty."""
    batch: list[Q]
    lost: list[Q] = field(default_factory=list)


@dataclass(frozen=True)
class Instances:
    """A model's instances: how many there are, and how many others wait for requests beside the one that decides."""
    total: int = 1
    idle: int = 0
    most: int = _ANY            # items beyond which a batch saves no time per item


def decide(queue: Iterable[Queued], now_ns: int, policy: BatchPolicy, idle: int = 0, most: int = _ANY) -> Send | Wait:
    """Decide whether an idle instance takes the front of a queue now, and how many requests of it.

    The window for a fuller batch opens when the oldest request arrives. Without max_queue_delay_us there is no window:
    a batch is what gathered while the instance was busy, shared with the other idle instances, up to `most` items.

    Parameters
    ----------
    queue : requests that wait, the oldest first; not empty
    idle : other instances that could execute requests now
    most : items beyond which a batch saves no time per item (PayingBatch). It has no effect where the policy has
        preferred sizes or a delay, which mean what they mean in Triton. A larger request is executed by itself.
    """
    if not policy.merges:
        return Send(1)
    largest = policy.largest_preferred
    items = count = 0
    preferred = 0                               # requests up to the largest preferred size that was met
    paying = 0                                  # requests up to `most` items
    full = False
    oldest_ns = now_ns
    first_key: Hashable = None
    for request in queue:
        if count == 0:
            first_key = request.shape_key
        else:
            grown = items + request.items
            if not preferred and grown > largest:
                preferred = count               # to wait would step over every preferred size
            if grown > policy.max_batch_size or request.shape_key != first_key:
                full = True
                break
        if request.enqueued_ns < oldest_ns:     # not of the first, where another has a higher priority
            oldest_ns = request.enqueued_ns
        items += request.items
        count += 1
        if items in policy.preferred_batch_sizes:
            preferred = count
        if items <= most:
            paying = count

    if policy.takes_what_waits:
        return Send(max(1, min(share(count, idle), paying)))
    window_ends_ns = oldest_ns + policy.max_queue_delay_us * 1000
    if policy.max_queue_delay_us and now_ns >= window_ends_ns:
        return Send(count)
    if preferred or full or items >= largest or not policy.max_queue_delay_us:
        return Send(preferred or count)
    return Wait(window_ends_ns)


def share(count: int, idle: int) -> int:
    """Return how many of `count` requests an instance takes if `idle` others could take some as well.

    Cores that would be idle make two small batches faster than one large.
    """
    return -(-count // (1 + idle))


def choose(queue: Collection[Q], now_ns: int, policy: BatchPolicy, instances: Instances, times: BatchTimes
           ) -> BatchChoice[Q] | Wait:
    """What an instance does with `queue` (oldest first, not empty), where some of it have deadlines.

    It executes the front of the queue, as decide() has it, as long as all of that can be answered in time. Otherwise
    the batch has the size that answers most items in time a second, and shed() says whose. Who shares no batch is
    judged by its own size.
    """
    decision = decide(queue, now_ns, policy, instances.idle, instances.most)
    if isinstance(decision, Wait):
        latest_ns = _latest_start_ns(queue, now_ns, times)
        if now_ns < latest_ns:
            return Wait(min(decision.until_ns, latest_ns))
    front = list(islice(queue, decision.count)) if isinstance(decision, Send) else list(queue)
    if now_ns <= _latest_start_ns(front, now_ns, times):
        return BatchChoice(front)
    if policy.merges and front[0].items <= policy.max_batch_size:
        largest = policy.max_batch_size
        if policy.takes_what_waits:
            largest = min(largest, max(instances.most, front[0].items))
        takes = {size: times.estimate(size, now_ns) for size in _halves(largest)}
        for takes_ns in ({size: each.safe for size, each in takes.items()},
                         {size: each.likely for size, each in takes.items()}):  # who may just make it, after all
            size = _best_size(queue, now_ns, takes_ns)
            if size:
                kept, lost = shed(queue, size, now_ns + takes_ns[size], takes[size].likely / instances.total)
                return BatchChoice(_in_time(kept, now_ns + takes_ns[size], size), lost)
    return _by_itself(front if policy.merges else queue, now_ns, times)


def _by_itself(queue: Iterable[Q], now_ns: int, times: BatchTimes) -> BatchChoice[Q]:
    """The first of `queue` that is safely answered in time if it is executed by itself, or else the first that may just
    make it; lost are those that it finds on the way and that are late."""
    hasty, lost = list[Q](), list[Q]()
    for request in queue:
        takes = times.estimate(request.items, now_ns)
        if not request.deadline_ns or now_ns + takes.safe <= request.deadline_ns:
            return BatchChoice([request], lost)
        (lost if now_ns + takes.likely > request.deadline_ns else hasty).append(request)
    return BatchChoice(hasty[:1], lost)


def shed(queue: Iterable[Q], size: int, done_ns: float, next_ns: float) -> tuple[list[Q], list[Q]]:
    """(kept, lost): the requests that can all be answered in time, and those that must be refused for it.

    Batches of `size` items go in the order of arrival; the first is answered at `done_ns`, each other `next_ns` after
    the one before. Where a request would be late, the one with the nearest deadline of all up to it is given up: no
    other choice answers more, and those who stay have the most time to spare.

    J. M. Moore, An n Job, One Machine Sequencing Algorithm for Minimizing the Number of Late Jobs, 1968
    """
    kept: dict[int, Q] = {}                         # by position in the queue
    deadlines: list[tuple[int, int]] = []           # of those kept that have one, a heap
    lost = []
    items = 0
    for position, request in enumerate(queue):
        if request.items > size:
            continue                                # not part of such batches: neither kept nor lost
        kept[position] = request
        items += request.items
        if not request.deadline_ns:
            continue
        heapq.heappush(deadlines, (request.deadline_ns, position))
        if request.deadline_ns < done_ns + next_ns * ((items - 1) // size):
            given_up = kept.pop(heapq.heappop(deadlines)[1])
            items -= given_up.items
            lost.append(given_up)
    return list(kept.values()), lost


def is_hopeless(request: Queued, now_ns: int, times: BatchTimes) -> bool:
    """Whether a request is most likely late even if it is executed at once and alone."""
    if not request.deadline_ns or request.deadline_ns > now_ns + times.longest_ns:
        return False
    return now_ns + times.estimate(request.items, now_ns).likely > request.deadline_ns


def _best_size(queue: Iterable[Queued], now_ns: int, takes_ns: Mapping[int, float]) -> int:
    """The batch size, of those given, that answers most items in time per second; of equals the first. 0: none does."""
    best, best_rate = 0, 0.0
    for size, ns in takes_ns.items():
        rate = _items(_in_time(queue, now_ns + ns, size)) / max(ns, 1)
        if rate > best_rate * _BETTER:
            best, best_rate = size, rate
    return best


def _in_time(queue: Iterable[Q], done_ns: float, size: int) -> list[Q]:
    """The oldest requests, up to `size` items of one shape, that may be answered at `done_ns`."""
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
    """When a batch must start so that each of its requests is safely answered in time."""
    batch = list(batch)
    deadlines = [request.deadline_ns for request in batch if request.deadline_ns]
    if not deadlines:
        return _NEVER_NS
    return int(min(deadlines) - times.estimate(_items(batch), now_ns).safe)


def _halves(size: int) -> list[int]:
    """`size`, half of it, and so on down to 1."""
    return [size >> i for i in range(size.bit_length())]


def _items(batch: Iterable[Queued]) -> int:
    return sum(request.items for request in batch)
