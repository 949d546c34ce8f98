"""Busy polling: keep the event loop awake for a short time after a response, in case the next request follows.

Waking a thread whose core sleeps takes 20 us and more, and its data has left the caches: for a small request that is as
long as everything else. A client that sends the next request after each response does so within 50 to 150 us.
"""
from __future__ import annotations

import asyncio
import os
import time

_MAX_POLL_NS = 200_000      # maximum time of polling; after longer gaps, having slept makes no difference
_MIN_SHORT_GAPS = 4         # number of short gaps from which the loop polls
_MAX_SHORT_GAPS = 8         # limit of the counter of short gaps, which each long gap halves


class BusyPoller:
    """Busy poller: between requests of a client that sends them back to back, the event loop polls instead of sleeping.

    It polls for at most a fifth of a millisecond, and only while that finds requests. Other processes get the core:
    each iteration yields, and a client that waits for the core makes the gaps long. Belongs to the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._short_gaps = 0
        self._idle_ns = 0               # time at which the last open request ended
        self.is_polling = False         # True while polling
        self._is_idle = True

    def opened(self) -> None:
        """Record that a request has arrived while none was open."""
        self._is_idle = False
        if time.monotonic_ns() - self._idle_ns < _MAX_POLL_NS:
            self._short_gaps = min(_MAX_SHORT_GAPS, self._short_gaps + 1)
        else:
            self._short_gaps >>= 1

    def idle(self) -> None:
        """Record that no request is open any more."""
        self._is_idle = True
        self._idle_ns = time.monotonic_ns()
        if self._short_gaps >= _MIN_SHORT_GAPS and not self.is_polling:
            self.is_polling = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        if self._is_idle and time.monotonic_ns() - self._idle_ns < _MAX_POLL_NS:
            os.sched_yield()
            self._loop.call_soon(self._poll)            # the loop polls its sockets first
        else:
            self.is_polling = False
