"""What clients of the fast front have not read: it tells how many of its calls are open, not whose.

A call is open until its answer has left this process. Those of which the answer was given are unread, and count for the
bound of what is held by the bytes of the last answers that were given. When no call ends for as long as a client may
take to read, everybody who was answered since nothing was unread is disconnected: who does not read is among them.
"""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from infer_server.endpoints.inflight import Inflight, OpenCall

log = logging.getLogger(__name__)

_LOOKING_SECS = 0.02


class Unread:
    """Belongs to the event loop."""

    def __init__(self, inflight: Inflight, calls: Callable[[], tuple[int, int]],
                 disconnect: Callable[[str], None]) -> None:
        """calls: how many were begun, and how many of them are unread. disconnect: a client, by its address."""
        self._inflight, self._calls, self._disconnect = inflight, calls, disconnect
        self._loop = asyncio.get_running_loop()
        self._last: deque[int] = deque()                # the bytes of answers, at least as many as are unread
        self._suspects: set[str] = set()
        self._held: OpenCall | None = None              # while there are any
        self._ended, self._ended_at = -1, 0.0           # calls, when that was another number

    def given(self, peer: str, answer_bytes: int) -> None:
        """To be called when an answer of so many bytes is handed over."""
        if self._held is None:
            self._held = self._inflight.begin(None, 0)
            self._loop.call_later(_LOOKING_SECS, self._look)
        self._inflight.count(self._held, answer_bytes)
        self._last.append(answer_bytes)
        self._suspects.add(peer)

    def _look(self) -> None:
        assert self._held is not None
        begun, unread = self._calls()
        while len(self._last) > unread:
            self._inflight.count(self._held, -self._last.popleft())
        if not unread:
            self._inflight.end(self._held)
            self._held = None
            self._suspects.clear()
            self._ended = -1
            return
        ended, now = begun - unread, self._loop.time()
        if ended != self._ended:
            self._ended, self._ended_at = ended, now
        elif now - self._ended_at > self._inflight.send_timeout_secs:
            log.warning("answers are not read: %s disconnected", ", ".join(sorted(self._suspects)) or "nobody is")
            for peer in self._suspects:
                self._disconnect(peer)
            self._suspects.clear()
            self._ended_at = now
        self._loop.call_later(_LOOKING_SECS, self._look)
