"""Request queue between the event loop, which submits requests, and the instances' threads, which take batches.

Instances pull: a batch is formed when an instance is free to execute it, never earlier, so that all requests that
arrived meanwhile are batched together.
"""
from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import chain, islice
from typing import Protocol

from infer_server.batching.batch_times import AdaptiveBatchLimit, BatchTimes
from infer_server.batching.expiry import Expiries
from infer_server.batching.policy import (
    BatchChoice,
    BatchPolicy,
    Instances,
    Priorities,
    QueuePolicy,
    Wait,
    choose,
    count_immediate,
    decide,
    is_hopeless,
)
from infer_server.batching.request import Request
from infer_server.errors import DeadlineExceededError, QueueFullError, RequestExpiredError, ServeError, UnavailableError

Refuse = Callable[[list[Request], ServeError], None]
# Requests in order of arrival with removal in O(1). In a plain dict, finding the first key skips all deleted entries.
_Queue = OrderedDict[Request, object]
_MISSING = object()
_SAMPLING_NS = 1_000_000        # of shorter batches of one size, one in this time is measured


class _Level:
    """Requests of one priority level."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.queue: _Queue = OrderedDict()          # oldest first
        self.delayed: _Queue = OrderedDict()        # expired with timeout_action DELAY; executed after `queue`


class Admission(Protocol):
    """Interface that an instance asks for permission to execute.

    All methods but enter() may wake instances of any model.
    """
    in_line: bool                   # True after a refusal; the instance asks again when wake_all() is called

    def enter(self) -> bool: ...

    def step_aside(self) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


class Batcher:
    """Request queue of a model's instances. Thread-safe.

    `refuse` is called with expired requests and an error, on the thread that found them.
    """

    def __init__(self, model: str, batching: BatchPolicy, queueing: Priorities | QueuePolicy, refuse: Refuse,
                 instances: int = 1, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._model = model
        self._batching = batching
        self._priorities = Priorities((queueing,)) if isinstance(queueing, QueuePolicy) else queueing
        self._levels = [_Level(policy) for policy in self._priorities.policies]     # highest priority first
        self._is_plain = len(self._levels) == 1 and batching.is_immediate
        self._refuse = refuse
        self._instances = instances
        self._clock_ns = clock_ns
        self._times = BatchTimes()
        self._batch_limit = AdaptiveBatchLimit(batching.max_batch_size, instances)
        self._timeouts = Expiries()                 # queue timeouts of requests that are not delayed
        self._deadlines = Expiries()                # deadlines of clients
        self._sampled_ns: dict[int, int] = {}       # times at which short batches were measured, by number of items
        self._idle = 0                              # instances that wait for requests
        self._refused = 0                           # instances that wait for admission
        self._closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)     # entering the lock directly is faster

    def __len__(self) -> int:
        if len(self._levels) == 1:
            (level,) = self._levels
            return len(level.queue) + len(level.delayed)
        return sum(len(level.queue) + len(level.delayed) for level in self._levels)

    def submit(self, request: Request) -> None:
        """Append a request; `wake` tells the instances.

        Raises
        ------
        QueueFullError
            The request's priority level has max_queue_size requests.
        DeadlineExceededError
            The request cannot be answered before its deadline.
        UnavailableError
            The queue is closed.
        """
        if len(self._levels) > 1:
            request.level = self._priorities.level(request.priority)
        level = self._levels[request.level]
        limit = level.policy.max_queue_size
        with self._lock:
            if self._closed:
                raise UnavailableError.closed(self._model)
            if limit and len(level.queue) + len(level.delayed) >= limit:
                raise QueueFullError(f"Exceeds maximum queue size: {limit} requests wait for model '{self._model}'"
                                     " already; retry later, or raise max_queue_size")
            request.enqueued_ns = self._clock_ns()
            if request.deadline_ns:
                if is_hopeless(request, request.enqueued_ns, self._times):
                    raise self._too_late(request.enqueued_ns)
                self._deadlines.add(request, request.deadline_ns)
            level.queue[request] = None
            if timeout_us := level.policy.timeout_us(request.timeout_us):
                request.expires_ns = request.enqueued_ns + timeout_us * 1000
                self._timeouts.add(request, request.expires_ns)

    def wake(self) -> None:
        """Wake an idle instance. Separate from `submit`, so that requests that arrive together cost one wake-up."""
        with self._lock:
            self._notify()

    def wake_all(self) -> None:
        """Wake all instances that wait for requests or for admission."""
        with self._lock:
            self._changed.notify_all()

    def withdraw(self, request: Request) -> bool:
        """Remove a request from the queue; return False if it is executing or has ended."""
        with self._lock:
            level = self._levels[request.level]
            if level.queue.pop(request, _MISSING) is _MISSING and level.delayed.pop(request, _MISSING) is _MISSING:
                return False
            if request.expires_ns or request.deadline_ns:
                self._forget_times(request)
            self._wake_refused()
            return True

    def take(self, gate: Admission | None = None) -> list[Request] | None:
        """Block until there is a batch to execute and remove it; return None if the queue is closed and empty.

        `gate` admits batches; None admits all.
        """
        with self._lock:
            while True:
                now_ns = self._clock_ns()
                self._expire(now_ns)
                choice = self._choose(now_ns, self._idle) if self else None
                if gate and gate.in_line and (choice is None or isinstance(choice, Wait)):
                    self._lock.release()
                    gate.step_aside()               # acquires this lock
                    self._lock.acquire()
                    continue
                if choice is None:
                    if self._closed:
                        return None
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                    continue
                if isinstance(choice, Wait):
                    until_ns = min(choice.until_ns, self._next_expiry_ns() or choice.until_ns)
                    self._changed.wait(min((until_ns - now_ns) / 1e9, threading.TIMEOUT_MAX))
                    continue
                if choice.refused:
                    self._refuse_all(choice.refused, self._too_late(now_ns))
                if choice.batch and gate and not self._admit(gate):
                    continue
                if choice.batch:
                    self._begin(choice.batch)
                    if self:
                        self._notify()              # another instance may execute the remaining requests
                    return choice.batch

    def take_short(self, is_short: Callable[[int], bool]) -> list[Request]:
        """Remove a batch that may execute now if it is short by its number of items and no request of it is lengthy.

        Return [] if there is none.
        """
        with self._lock:
            if self._closed:
                return []
            plain = self._is_plain and not (self._timeouts.due_ns or self._deadlines.due_ns or self._levels[0].delayed)
            batch = self._plain_batch(is_short) if plain else self._short_choice()
            if not batch or not is_short(sum([request.items for request in batch])) or any(
                    [request.lengthy for request in batch]):
                return []
            self._begin(batch)
            return batch

    def _plain_batch(self, is_short: Callable[[int], bool]) -> list[Request]:
        """Return the next batch of a queue without priorities, delays, timeouts and deadlines; [] if it is not short.

        A request has an item or more: most batches that are not short are not counted.
        """
        queue = self._levels[0].queue
        count = len(queue) if self._batching.merges else min(len(queue), 1)
        if count > 1:
            if not is_short(min(count, self._batch_limit.limit)):
                return []
            limit = self._batch_limit.current_limit(self._clock_ns())
            count = count_immediate(queue, self._batching.max_batch_size, 0, limit)
        return list(islice(queue, count))

    def _short_choice(self) -> list[Request]:
        now_ns = self._clock_ns()
        self._expire(now_ns)
        choice = self._choose(now_ns, idle=0) if self else None
        return choice.batch if isinstance(choice, BatchChoice) and not choice.refused else []

    def record_time(self, items: int, ns: int) -> None:
        """Record that a batch of `items` took `ns` from `take` until its responses were handed on."""
        now_ns = self._clock_ns()
        if ns < _SAMPLING_NS and items <= self._batching.max_batch_size:
            if now_ns < self._sampled_ns.get(items, 0):
                return
            self._sampled_ns[items] = now_ns + _SAMPLING_NS
        with self._lock:
            self._times.add(items, ns, now_ns)
            self._batch_limit.add(items, ns, now_ns)

    def expire(self) -> None:
        """Refuse or delay the requests whose timeout has passed, as the queue policy says."""
        with self._lock:
            self._expire(self._clock_ns())

    def next_expiry_ns(self) -> int | None:
        """Return the time at which the next request expires, or None."""
        with self._lock:
            return self._next_expiry_ns()

    def close(self) -> None:
        """Accept no more requests; execute the waiting ones without waiting for fuller batches."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _notify(self) -> None:
        """Wake an idle instance; instances without admission wait on the same condition, so wake that many more."""
        self._changed.notify(1 + self._refused)

    def _admit(self, gate: Admission) -> bool:
        """Return True if a batch is admitted; otherwise wait until that may have changed."""
        waited = gate.in_line
        if gate.enter():
            return True
        if not waited:
            self._notify()                          # another instance may need none of the resources
        self._refused += 1
        self._changed.wait()                        # the event loop refuses requests that expire meanwhile
        self._refused -= 1
        return False

    def _waiting(self) -> Collection[Request]:
        first = self._levels[0]
        if len(self._levels) == 1 and not first.delayed:
            return first.queue.keys()
        return list(chain.from_iterable(chain(level.queue, level.delayed) for level in self._levels))

    def _choose(self, now_ns: int, idle: int) -> BatchChoice[Request] | Wait:
        choice: BatchChoice[Request] | Wait
        waiting = self._waiting()
        limit = self._batch_limit.current_limit(now_ns)
        if self._deadlines.due_ns:
            choice = choose(waiting, now_ns, self._batching, Instances(self._instances, idle, limit), self._times)
        else:
            decision = decide(waiting, now_ns, self._batching, idle, limit)
            choice = decision if isinstance(decision, Wait) else BatchChoice(list(islice(waiting, decision.count)))
        if isinstance(choice, Wait) and self._closed:
            return BatchChoice(list(waiting))        # Wait means that all requests fit into one batch
        return choice

    def _begin(self, batch: Collection[Request]) -> None:
        """Remove a batch that an instance executes now."""
        self._batch_limit.record_start(sum([request.items for request in batch]), self._clock_ns())
        self._remove(batch)

    def _remove(self, requests: Collection[Request]) -> None:
        first = self._levels[0].queue
        if len(first) == len(requests) == len(self) and not (self._timeouts.due_ns or self._deadlines.due_ns):
            first.clear()
            requests = ()
        for request in requests:
            level = self._levels[request.level]
            if level.queue.pop(request, _MISSING) is _MISSING:
                level.delayed.pop(request, None)
            if request.expires_ns or request.deadline_ns:
                self._forget_times(request)
        self._wake_refused()

    def _wake_refused(self) -> None:
        """Wake the instances that wait for admission while the queue is empty: they block other models."""
        if self._refused and not self:
            self._changed.notify_all()

    def _forget_times(self, request: Request) -> None:
        if request.expires_ns:
            self._timeouts.discard(request)
        if request.deadline_ns:
            self._deadlines.discard(request)

    def _expire(self, now_ns: int) -> None:
        late = self._deadlines.pop_before(now_ns + self._shortest_ns(now_ns)) if self._deadlines.due_ns else []
        if late:
            self._refuse_all(late, self._too_late(now_ns))
        expired = self._timeouts.pop_before(now_ns) if self._timeouts.due_ns else []
        refused = []
        for request in expired:
            level = self._levels[request.level]
            if level.policy.delay_expired:
                del level.queue[request]
                level.delayed[request] = None
            else:
                refused.append(request)
        if refused:
            self._refuse_all(refused, RequestExpiredError(
                f"Request timeout expired: it waited longer than its timeout for model '{self._model}'"))

    def _refuse_all(self, requests: list[Request], error: ServeError) -> None:
        self._remove(requests)
        self._refuse(requests, error)

    def _next_expiry_ns(self) -> int | None:
        times = [self._timeouts.first_ns(), self._deadlines.first_ns()]
        if times[1] is not None:
            times[1] -= self._shortest_ns(self._clock_ns())
        return min((ns + 1 for ns in times if ns is not None), default=None)

    def _shortest_ns(self, now_ns: int) -> int:
        """Return the likely time of a batch of one item; a deadline that is nearer will be missed."""
        return int(self._times.estimate(1, now_ns).likely)

    def _too_late(self, now_ns: int) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"Deadline Exceeded: model '{self._model}' could not have answered in time (an execution takes about "
            f"{self._shortest_ns(now_ns) / 1e6:.3g} ms); the request was not executed")
