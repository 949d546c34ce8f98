"""A queue of requests with what the event loop does for it."""
from __future__ import annotations

import asyncio
from collections.abc import Callable

from infer_server.batching.batcher import Batcher
from infer_server.batching.event_loop import ExpiryTimer, Waker
from infer_server.batching.request import Request


class RequestQueue:
    """Its instances take batches of `batcher`; the rest belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: Batcher, max_batch_size: int,
                 execute_short: Callable[[], bool]) -> None:
        """execute_short: see Waker."""
        self.batcher = batcher
        self._waker = Waker(loop, batcher, max_batch_size, execute_short)
        self.watch_expiry = ExpiryTimer(loop, batcher).submitted    # has a request end when it expires in the queue

    def submit(self, request: Request) -> None:
        """Queues a request. Raises as Batcher.submit."""
        self.batcher.submit(request)
        self._waker.submitted()
        if request.deadline_ns or request.expires_ns:
            self.watch_expiry(request)
