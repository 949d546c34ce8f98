"""A timer on the event loop that makes the queue refuse requests as they expire."""
from __future__ import annotations

import asyncio
import time

from infer_server.batching.batcher import Batcher
from infer_server.batching.request import Request

_LONGEST_NS = 1_000_000_000     # between two looks: a batch may turn out to take longer, which moves what is due


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
        if request.deadline_ns or request.expires_ns:
            due_ns = min(request.deadline_ns or request.expires_ns, request.expires_ns or request.deadline_ns)
            if self._timer is None or due_ns < self._fires_ns + _LONGEST_NS:
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
