"""Looking for the next request a while longer, before the event loop sleeps.

To wake a thread whose core sleeps takes 20 us and more, and what it needs has left the caches: for a small request that
is as long as all the rest. A client that asks again when it is answered does so within 50 to 150 us.
"""
from __future__ import annotations

import asyncio
import os
import time

_LONGEST_NS = 200_000       # of a look: for more, to have slept makes no difference
_SURE = 4                   # gaps in a row that were shorter, before there is a look
_MOST = 8                   # that count: each gap that was longer halves them


class Lookout:
    """Between requests of one who asks again at once, the event loop polls its sockets instead of sleeping: for a fifth
    of a millisecond at most, and only as long as that finds requests. Belongs to the event loop.

    Who else wants the core has it: each turn yields, and a client that waits for it makes the gaps long.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._short_gaps = 0
        self._idle_ns = 0               # since when no request is open
        self.is_looking = False         # the loop is not to sleep yet
        self._is_idle = True

    def opened(self) -> None:
        """To be called when a request has come while none was open."""
        self._is_idle = False
        if time.monotonic_ns() - self._idle_ns < _LONGEST_NS:
            self._short_gaps = min(_MOST, self._short_gaps + 1)
        else:
            self._short_gaps >>= 1

    def idle(self) -> None:
        """To be called when none is open any more."""
        self._is_idle = True
        self._idle_ns = time.monotonic_ns()
        if self._short_gaps >= _SURE and not self.is_looking:
            self.is_looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        if self._is_idle and time.monotonic_ns() - self._idle_ns < _LONGEST_NS:
            os.sched_yield()
            self._loop.call_soon(self._look)            # after a look at the sockets
        else:
            self.is_looking = False
