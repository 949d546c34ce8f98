"""When to send a batch, and which requests have waited too long: pure functions of the queue, the clock and the policy.

The rules are Triton's (core/src/dynamic_batch_scheduler.cc, GetDynamicBatch; scheduler_utils.cc, ApplyPolicy).
"""
from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol


class Queued(Protocol):
    """What a decision needs to know of a waiting request."""
    @property
    def rows(self) -> int: ...                  # items on its batch axis
    @property
    def shape_key(self) -> Hashable: ...        # requests of unequal keys never share a batch
    @property
    def enqueued_ns(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...           # 0: it may wait forever


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
class Send:
    """Execute the first `count` requests of the queue together."""
    count: int


@dataclass(frozen=True)
class Wait:
    """Nothing to execute before `until_ns`, unless a request arrives."""
    until_ns: int


def decide(queue: Iterable[Queued], now_ns: int, policy: BatchPolicy) -> Send | Wait:
    """Whether an idle instance takes the front of `queue` (oldest first, not empty) now, and how much of it.

    The window for a fuller batch opens when the oldest request arrives; without max_queue_delay_us it is never open,
    and a batch is whatever has gathered while the instance was busy.
    """
    if not policy.merges:
        return Send(1)
    rows = count = 0
    preferred = 0                               # requests up to the largest preferred size that was met
    full = False
    oldest_ns = now_ns
    first_key: Hashable = None
    for request in queue:
        if count == 0:
            first_key, oldest_ns = request.shape_key, request.enqueued_ns
        else:
            grown = rows + request.rows
            if not preferred and grown > policy.largest_preferred:
                preferred = count               # to wait would step over every preferred size
            if grown > policy.max_batch_size or request.shape_key != first_key:
                full = True
                break
        rows += request.rows
        count += 1
        if rows in policy.preferred_batch_sizes:
            preferred = count

    window_ends_ns = oldest_ns + policy.max_queue_delay_us * 1000
    if policy.max_queue_delay_us and now_ns >= window_ends_ns:
        return Send(count)
    if preferred:
        return Send(preferred)
    if full or rows >= policy.largest_preferred or not policy.max_queue_delay_us:
        return Send(count)
    return Wait(window_ends_ns)


def share(count: int, idle: int, policy: BatchPolicy) -> int:
    """How many of `count` requests an instance takes if `idle` others could take some as well.

    Cores that would be idle make two small batches faster than one large. Not where the policy asks for certain sizes
    or waits for fuller batches.
    """
    if policy.preferred_batch_sizes or policy.max_queue_delay_us:
        return count
    return -(-count // (1 + idle))


def expired(queue: Iterable[Queued], now_ns: int) -> list[int]:
    """The positions of the requests whose deadline has passed."""
    return [i for i, request in enumerate(queue) if request.deadline_ns and now_ns > request.deadline_ns]
