"""When an idle instance learns that requests wait: once the event loop has no more of them at hand."""
from __future__ import annotations

import asyncio
import time

from infer_server.batching.batcher import Batcher

_QUIET_TURNS = 8            # of the loop without a new request; about 20 us when there is nothing else to do
_LIMIT_NS = 5_000_000       # while requests keep coming; only a loop that is busy reading them gets this far


class Waker:
    """Belongs to the event loop.

    Requests that arrive together are read one after the other, each over several turns of the loop. To wake an instance
    for the first would execute it alone, and would have its thread fight the loop for the interpreter while the others
    are read. No timer is waited for: a loop without work takes its quiet turns at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: Batcher, max_batch_size: int) -> None:
        self._loop = loop
        self._batcher = batcher
        self._max_batch_size = max_batch_size
        self._watching = False
        self._quiet_turns = 0
        self._limit_ns = 0

    def submitted(self) -> None:
        """To be called when a request was put into the queue: an instance is woken a few turns of the loop later."""
        self._quiet_turns = 0
        if not self._watching:
            self._watching = True
            self._limit_ns = time.monotonic_ns() + _LIMIT_NS
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._quiet_turns += 1
        gathering = 0 < len(self._batcher) < self._max_batch_size       # 0: a busy instance came by and took them
        if gathering and self._quiet_turns < _QUIET_TURNS and time.monotonic_ns() < self._limit_ns:
            self._loop.call_soon(self._turn)
            return
        self._watching = False
        self._batcher.wake()
