"""Request queue together with its wake-ups and expiry timer on the event loop."""
from __future__ import annotations

import asyncio
from collections.abc import Callable

from infer_server.batching.batcher import Batcher
from infer_server.batching.event_loop import ExpiryTimer, Waker
from infer_server.batching.request import Request


class RequestQueue:
    """Batcher with its Waker and ExpiryTimer.

    Instances take batches of `batcher`; everything else belongs to the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: Batcher, max_batch_size: int,
                 execute_short: Callable[[], bool]) -> None:
        """Attach a Waker and an ExpiryTimer to a batcher; see `Waker` for `execute_short`."""
        self.batcher = batcher
        self._waker = Waker(loop, batcher, max_batch_size, execute_short)
        self.watch_expiry = ExpiryTimer(loop, batcher).submitted    # refuses a queued request when it expires

    def submit(self, request: Request) -> None:
        """Queue a request; raises as `Batcher.submit`."""
        self.batcher.submit(request)
        self._waker.submitted()
        if request.deadline_ns or request.expires_ns:
            self.watch_expiry(request)
