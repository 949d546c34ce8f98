"""What pygrpc-native was given for its clients, and these have not read: it keeps that, and does not tell whose it is.

It counts the calls of a method that have ended, and the bytes of their answers: what was handed over besides is unread,
to the byte. Whose it is shows in how much the other end of a connection acknowledges.
"""
from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from infer_server.endpoints.grpc.connections import Connections
from infer_server.endpoints.inflight import LITTLE_BYTES, Inflight
from infer_server.workers import post

if TYPE_CHECKING:
    from pygrpc_native import NativeGrpcFront

_LOOKING_SECS = 0.2             # between two looks, as long as calls are open


class Outbox:
    """The answers to the calls of one method. Belongs to the event loop, but for respond()."""

    def __init__(self, native: NativeGrpcFront, method: str, inflight: Inflight,
                 disconnect: Callable[[str], None]) -> None:
        """inflight: is told what is unread. disconnect: ends the connection of a peer as gRPC names it."""
        self._native, self._method, self._inflight, self._disconnect = native, method, inflight, disconnect
        self._loop = asyncio.get_running_loop()
        self._connections = Connections(native.bound_port)
        self._handed_over: deque[int] = deque()         # the sizes of answers, since the last look
        self._handed_bytes = 0                          # before it, since all was read
        self._read_bytes = 0                            # what pygrpc-native had counted by then
        self._largest_bytes = 0                         # of one answer, since then
        self._is_looking = False
        self._unread_bytes = 0
        inflight.look_before_refusing(self.look)

    # ---- calls.Transport
    def respond(self, number: int, response: bytes, peer: str) -> None:
        """Hands an answer over. From any thread."""
        size = len(response)
        if size <= LITTLE_BYTES:                # what is smaller is sent whether it is read or not
            if self._native.respond(number, response):
                self._handed_over.append(size)
            return
        taken_bytes = self._connections.taken_bytes(peer)
        if self._native.respond(number, response):
            self._handed_over.append(size)
            post(self._loop, self._watch, peer, size, taken_bytes)

    def fail(self, number: int, code: int, details: str) -> None:
        self._native.fail(number, code, details)

    def open_calls(self) -> int:
        """How many are not answered, or their answers are not read."""
        return self._counted()[0]

    def look(self) -> None:
        """Counts what is unread now."""
        open_calls, read_bytes = self._counted()
        # Nothing is unread, even if a call ended as it was answered: of that no bytes are counted as read.
        if not open_calls and not self._handed_over:
            self._handed_bytes, self._read_bytes, self._largest_bytes = 0, read_bytes, 0
        while self._handed_over:                # after the count: what is read meanwhile counts as unread, not as less
            size = self._handed_over.popleft()
            self._handed_bytes += size
            self._largest_bytes = max(self._largest_bytes, size)
        unread = max(0, self._handed_bytes - (read_bytes - self._read_bytes))
        # Each such call that ended leaves some behind, which would add up where there is always another one open.
        if (excess := unread - open_calls * self._largest_bytes) > 0:
            self._handed_bytes -= excess
            unread -= excess
        if unread != self._unread_bytes:
            self._unread_bytes = unread
            self._inflight.count_unread(self, unread)
        if unread:
            self.keep_looking()                 # nobody does any more if the call came long ago

    def keep_looking(self) -> None:
        """To be called when calls have come."""
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_later(_LOOKING_SECS, self._look_again)

    def _look_again(self) -> None:
        self.look()
        self._is_looking = False
        if self._unread_bytes or self._handed_over:
            self.keep_looking()

    def _counted(self) -> tuple[int, int]:
        """How many calls are open, and how many bytes the answers to the others had."""
        metrics: Any = self._native.metrics()
        calls = metrics["methods"][self._method]
        ended = calls["status"].values()
        return calls["started"] - sum(each["count"] for each in ended), sum(each["sent"]["sum"] for each in ended)

    def _watch(self, peer: str, size: int, taken_bytes: int | None) -> None:
        """Looks after an answer that is not little. taken_bytes: by its client, before it was handed over."""
        self.look()
        if taken_bytes is not None:
            self._loop.call_later(self._inflight.send_timeout_secs, self._check, peer, size, taken_bytes)

    def _check(self, peer: str, size: int, taken_bytes: int) -> None:
        """Ends a connection over which too little went since for its answer, if one of that size is unread at all."""
        self.look()
        now = self._connections.taken_bytes(peer) if self._unread_bytes >= size else None
        if now is not None and now - taken_bytes < size:
            self._inflight.warn_of(peer)
            self._disconnect(peer)
