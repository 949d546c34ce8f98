"""When the event loop looks for requests that expired."""
from __future__ import annotations

import asyncio
import time

from infer_server.batcher import Batcher
from infer_server.request import Request

_LONGEST_SECS = 1.0             # a batch may turn out to take longer, which moves what is due


class ExpiryTimer:
    """Has the queue refuse what expires while every instance is busy: at once, not when the next batch is taken.

    Belongs to the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: Batcher) -> None:
        self._loop = loop
        self._batcher = batcher
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = 0

    def submitted(self, request: Request) -> None:
        """A request was put into the queue."""
        if request.deadline_ns or request.expires_ns:
            self._arm()

    def _arm(self) -> None:
        due_ns = self._batcher.next_expiry_ns()
        if due_ns is None or (self._timer is not None and self._due_ns <= due_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_ns = due_ns
        delay_secs = min(max((due_ns - time.monotonic_ns()) / 1e9, 0.0), _LONGEST_SECS)
        self._timer = self._loop.call_later(delay_secs, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._batcher.expire()
        self._arm()
