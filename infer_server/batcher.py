"""The queue between the event loop, which submits requests, and the instances' threads, which take batches.

Whoever is free pulls: a batch is formed at the moment when an instance can execute it, never earlier, so that all that
gathered while it was busy goes together.
"""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import chain

from infer_server.errors import QueueFullError, UnavailableError
from infer_server.policy import BatchPolicy, QueuePolicy, Send, decide, expired, share
from infer_server.request import Request


class Batcher:
    """Thread-safe. `refuse` is called with requests whose timeout passed, on the thread that noticed it."""

    def __init__(self, model: str, batching: BatchPolicy, queueing: QueuePolicy,
                 refuse: Callable[[list[Request]], None], clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._model = model
        self._batching = batching
        self._queueing = queueing
        self._refuse = refuse
        self._clock_ns = clock_ns
        self._queue: deque[Request] = deque()       # oldest first
        self._delayed: deque[Request] = deque()     # expired under timeout_action DELAY: served when nothing else waits
        self._timed = 0                             # how many in _queue have a deadline
        self._idle = 0                              # instances that wait for requests
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    def __len__(self) -> int:
        return len(self._queue) + len(self._delayed)

    @property
    def idle(self) -> int:
        """Instances that wait for requests."""
        return self._idle

    def submit(self, request: Request) -> None:
        """Appends a request. The instances learn of it by wake().

        Raises QueueFullError, or UnavailableError after close().
        """
        limit = self._queueing.max_queue_size
        with self._changed:
            if self._closed:
                raise UnavailableError(
                    f"model '{self._model}' takes no more requests: it is being unloaded, or the server is stopping")
            if limit and len(self) >= limit:
                raise QueueFullError(f"Exceeds maximum queue size: {limit} requests wait for model '{self._model}'"
                                     " already; retry later, or raise max_queue_size")
            request.enqueued_ns = self._clock_ns()
            timeout_us = self._queueing.timeout_us(request.timeout_us)
            if timeout_us:
                request.deadline_ns = request.enqueued_ns + timeout_us * 1000
                self._timed += 1
            self._queue.append(request)

    def wake(self) -> None:
        """Wakes an idle instance. Apart from submit(), so that requests which arrive together cost one wake-up."""
        with self._changed:
            self._changed.notify()

    def withdraw(self, request: Request) -> bool:
        """Takes a request out of the queue; False if it is no longer there: executing, or ended."""
        with self._changed:
            for queue in (self._queue, self._delayed):
                if request in queue:
                    queue.remove(request)
                    self._timed -= bool(request.deadline_ns)
                    return True
        return False

    def take(self) -> list[Request] | None:
        """Blocks until there is a batch to execute, and removes it. None: closed, and nothing is left."""
        with self._changed:
            while True:
                now_ns = self._clock_ns()
                if self._timed:
                    self._expire(now_ns)
                if not self._queue and not self._delayed:
                    if self._closed:
                        return None
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                    continue
                decision = decide(chain(self._queue, self._delayed), now_ns, self._batching)
                if isinstance(decision, Send) or self._closed:
                    count = decision.count if isinstance(decision, Send) else len(self)
                    return self._pop(share(count, self._idle, self._batching))
                self._changed.wait((self._next_event_ns(decision.until_ns) - now_ns) / 1e9)

    def close(self) -> None:
        """Accepts nothing more; what waits is still executed, without waiting for fuller batches."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _pop(self, count: int) -> list[Request]:
        batch = [self._queue.popleft() if self._queue else self._delayed.popleft() for _ in range(count)]
        if self._timed:
            self._timed -= sum(1 for request in batch if request.deadline_ns)
        if self._queue or self._delayed:
            self._changed.notify()                  # what is left may keep another instance busy
        return batch

    def _expire(self, now_ns: int) -> None:
        late = [self._queue[i] for i in expired(self._queue, now_ns)]
        if not late:
            return
        for request in late:
            self._queue.remove(request)
            request.deadline_ns = 0
        self._timed -= len(late)
        if self._queueing.delay_expired:
            self._delayed.extend(late)
        else:
            self._refuse(late)

    def _next_event_ns(self, window_ends_ns: int) -> int:
        """When to look again: the batching window ends, or before that a deadline passes."""
        if not self._timed:
            return window_ends_ns
        return min(window_ends_ns, 1 + min(request.deadline_ns for request in self._queue if request.deadline_ns))
