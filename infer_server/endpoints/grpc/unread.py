"""What clients of pygrpc-native have not read of their answers, as their connections tell: it does not say itself when
an answer has left the process.

    unread bytes of a connection = bytes of the answers that were handed over - bytes that its client has acknowledged

The second is the kernel's count, which has a little more in it (frames, headers, other calls).
"""
from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from infer_server.endpoints.grpc.connections import acknowledged
from infer_server.endpoints.inflight import Inflight, OpenCall
from infer_server.workers import in_daemon_thread

_MUCH_BYTES = 16 << 20          # of answers, after which it looks
_LITTLE_BYTES = 1 << 20         # of a connection, which is as good as read
_LOOKING_SECS = 0.25            # between two looks while something is unread ...
_SHARE = 10                     # ... and so many times as long as one takes: it goes through all descriptors


@dataclass
class _Peer:
    """A connection with unread answers, as it was at the last look."""
    held: OpenCall
    acknowledged: int
    since: float                # nothing more was acknowledged


class Unread:
    """Belongs to the event loop."""

    def __init__(self, port: int, inflight: Inflight, disconnect: Callable[[str], None]) -> None:
        self._port, self._inflight, self._disconnect = port, inflight, disconnect
        self._handed = Counter[str]()           # bytes of answers, by connection
        self._fresh = 0                         # of them since the last look
        self._slow: dict[str, _Peer] = {}
        self._looking: asyncio.Task[None] | None = None

    def handed_over(self, peer: str, answer_bytes: int) -> None:
        self._handed[peer] += answer_bytes
        self._fresh += answer_bytes
        if self._fresh >= _MUCH_BYTES and self._looking is None:
            self._looking = asyncio.ensure_future(self._look_on())

    async def _look_on(self) -> None:
        """Looks until all is read."""
        try:
            while self._slow or self._fresh >= _MUCH_BYTES:
                began = time.monotonic()
                self._fresh, handed = 0, self._handed.copy()
                self._compare(handed, await in_daemon_thread(lambda: acknowledged(self._port)))
                await asyncio.sleep(max(_LOOKING_SECS, _SHARE * (time.monotonic() - began)))
        finally:
            self._looking = None

    def _compare(self, handed: Counter[str], taken: dict[str, int]) -> None:
        now = time.monotonic()
        for peer, count in handed.items():
            read = taken.get(unquote(peer))
            unread = 0 if read is None else count - read
            if read is not None and unread > _LITTLE_BYTES:
                slow = self._slow.setdefault(peer, _Peer(OpenCall(_Reader(peer, self._disconnect)), read, now))
                if read != slow.acknowledged:
                    slow.acknowledged, slow.since = read, now
                self._inflight.measured(slow.held, unread)
                if now - slow.since >= self._inflight.send_timeout_secs:
                    self._inflight.give_up(slow.held)
            elif peer in self._slow:
                self._inflight.end(self._slow.pop(peer).held)
            if read is None:                    # it has gone
                del self._handed[peer]


@dataclass
class _Reader:
    """An inflight.Client."""
    name: str
    end: Callable[[str], None]

    def peer(self) -> str:
        return self.name

    def disconnect(self) -> None:
        self.end(self.name)
