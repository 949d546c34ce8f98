"""What the event loop does for a queue: it executes short batches or wakes an idle instance when requests wait, and
refuses those that expire."""
from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from infer_server.batching.batcher import Batcher
from infer_server.batching.request import Request

_QUIET_TURNS = 8            # of the loop without a new request; about 20 us when there is nothing else to do
_LIMIT_NS = 5_000_000       # while requests keep coming; only a loop that is busy reading them gets this far
_LONGEST_NS = 1_000_000_000     # between two looks: a batch may turn out to take longer, which moves what is due


class Waker:
    """Has requests executed once the event loop has no more of them at hand. Belongs to the event loop.

    Requests that arrive together are read one after the other, each over several turns of the loop. To wake an instance
    for the first would execute it alone, and would have its thread fight the loop for the interpreter while the others
    are read. No timer is waited for: a loop without work takes its quiet turns at once. Where requests come alone, one
    after the other, they become fewer, down to one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: Batcher, max_batch_size: int,
                 execute_short: Callable[[], bool]) -> None:
        """execute_short: executes a batch that is no longer than to wake an instance for it. False: there is none."""
        self._loop = loop
        self._batcher = batcher
        self._max_batch_size = max_batch_size
        self._execute_short = execute_short
        self._watching = False
        self._quiet_turns = 0
        self._wanted_turns = _QUIET_TURNS
        self._together = 0              # requests since it began to watch
        self._limit_ns = 0

    def submitted(self) -> None:
        """To be called when a request was put into the queue: an instance is woken a few turns of the loop later."""
        self._quiet_turns = 0
        self._together += 1
        if not self._watching:
            self._watch()

    def _watch(self) -> None:
        self._watching = True
        self._together = 1
        self._limit_ns = time.monotonic_ns() + _LIMIT_NS
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._quiet_turns += 1
        gathering = 0 < len(self._batcher) < self._max_batch_size       # 0: a busy instance came by and took them
        if gathering and self._quiet_turns < self._wanted_turns and time.monotonic_ns() < self._limit_ns:
            self._loop.call_soon(self._turn)
            return
        self._wanted_turns = _QUIET_TURNS if self._together > 1 else max(1, self._wanted_turns // 2)
        self._watching = False
        if not self._execute_short():
            self._batcher.wake()
        elif len(self._batcher) and not self._watching:
            self._quiet_turns = self._wanted_turns
            self._watch()


class ExpiryTimer:
    """Has the queue refuse what expires while every instance is busy: at once, not when the next batch is taken.

    Belongs to the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: Batcher) -> None:
        self._loop = loop
        self._batcher = batcher
        self._timer: asyncio.TimerHandle | None = None
        self._fires_ns = 0              # when the timer does

    def submitted(self, request: Request) -> None:
        """To be called when a request was put into the queue: it may expire before the timer is due."""
        due_ns = min(request.deadline_ns or request.expires_ns, request.expires_ns or request.deadline_ns)
        if due_ns and (self._timer is None or due_ns < self._fires_ns + _LONGEST_NS):
            self._arm()

    def _arm(self) -> None:
        due_ns = self._batcher.next_expiry_ns()
        if due_ns is None or (self._timer is not None and self._fires_ns <= due_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        now_ns = time.monotonic_ns()
        self._fires_ns = min(max(due_ns, now_ns), now_ns + _LONGEST_NS)
        self._timer = self._loop.call_later((self._fires_ns - now_ns) / 1e9, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._batcher.expire()
        self._arm()
