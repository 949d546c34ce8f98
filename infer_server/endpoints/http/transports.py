"""Transport helpers of HTTP/1.1 connections.

Zero-copy receive of large bodies, probing of half-closed clients, and timeouts of clients that do not read.
"""
from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from infer_server.endpoints.inflight import Client, Inflight, OpenCall
from infer_server.protos.buffers import uninitialised

LARGE_BYTES = 64 << 10          # a body is large if at least this many bytes are still to come
_FIRST_SECS = 0.1               # delay of the first interim response; every next delay is twice as long
_INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


class Owner(Protocol):
    """Interface of the connection whose transport a LargeBody uses: HttpConnection."""

    def body_grows(self, count: int) -> bool:
        """Count `count` received bytes; return False if the body is rejected and the owner has the transport again."""

    def body_received(self, body: bytearray) -> None:
        """Accept the complete body and take the transport back."""

    def eof_received(self) -> bool: ...

    def connection_lost(self, reason: Exception | None) -> None: ...

    def resume_writing(self) -> None: ...


class LargeBody(asyncio.BufferedProtocol):
    """Protocol that receives a large body directly into its final buffer, without copies or parsing.

    It has the connection's transport until the body is complete. Then it drops the body, because uvloop's transport may
    keep a reference to the protocol while the connection is open.
    """

    def __init__(self, owner: Owner, size: int, begun: Sequence[bytes | bytearray | memoryview]) -> None:
        """Prepare for a body of `size` bytes, of which the pieces `begun` have arrived."""
        self._owner = owner
        self._body = uninitialised(size)         # zeroing it would cost as much as a copy
        self._missing = memoryview(self._body)
        for piece in begun:
            self._missing[:len(piece)] = piece
            self._missing = self._missing[len(piece):]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._missing

    def buffer_updated(self, nbytes: int) -> None:
        self._missing = self._missing[nbytes:]
        if not self._owner.body_grows(nbytes):
            self._body, self._missing = bytearray(), memoryview(b"")
        elif not self._missing:
            body, self._body, self._missing = self._body, bytearray(), memoryview(b"")
            self._owner.body_received(body)

    def eof_received(self) -> bool:
        return self._owner.eof_received()           # an earlier request may still await its response

    def connection_lost(self, reason: Exception | None) -> None:
        self._owner.connection_lost(reason)

    def resume_writing(self) -> None:
        self._owner.resume_writing()


class HalfClosed:
    """Probe of a client that has closed its sending direction and awaits a response.

    TCP cannot distinguish it from a client that has disconnected. Interim responses (102 Processing) are sent until the
    response begins; HTTP/1.1 clients ignore them. A client that has disconnected resets the connection at the first,
    and the next write detects that. https://www.rfc-editor.org/rfc/rfc9110#section-15.2
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop, self._transport = loop, transport
        self._secs = _FIRST_SECS
        self._timer = loop.call_later(self._secs, self._send_interim)

    def cancel(self) -> None:
        """Stop probing: the response begins, or the client has disconnected."""
        self._timer.cancel()

    def _send_interim(self) -> None:
        self._transport.write(_INTERIM)
        self._secs *= 2
        self._timer = self._loop.call_later(self._secs, self._send_interim)


class Outlet:
    """Writer that counts responses as held until the socket has accepted them.

    It disconnects a client that does not read within the send timeout, even if responses are small: a client may send
    any number of requests.
    """

    def __init__(self, transport: asyncio.Transport, inflight: Inflight, client: Client) -> None:
        self._transport, self._inflight, self._client = transport, inflight, client
        self._loop = asyncio.get_running_loop()
        self._sending: list[OpenCall] = []                      # written but not accepted by the socket
        self._written_bytes = 0
        self._unread: asyncio.TimerHandle | None = None         # send timeout, set while there are such calls
        transport.set_write_buffer_limits(high=0)       # resume_writing is called when the buffer is empty

    def write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        if len(data) > LARGE_BYTES and not self._transport.can_write_eof():
            # A TLS transport does not report bytes that it has passed to the socket's buffer. The last byte is written
            # separately: it stays in the write buffer while the socket's is full.
            self._transport.write(memoryview(data)[:-1])
            data = data[-1:]
        self._transport.write(data)

    def sent(self, open_call: OpenCall, body_bytes: int) -> None:
        """Keep the bytes of a written response or piece counted until the socket has accepted them."""
        if self._transport.get_write_buffer_size():
            self._sending.append(open_call)
            self._inflight.answered(open_call, body_bytes)
            if not self._unread:
                self._await_reader()
        else:
            self._inflight.end(open_call)

    def taken(self) -> None:
        """Release all calls: the socket has accepted everything, or is closed."""
        if self._unread:
            self._unread.cancel()
            self._unread = None
        for open_call in self._sending:
            self._inflight.end(open_call)
        self._sending.clear()

    def _await_reader(self) -> None:
        self._unread = self._loop.call_later(self._inflight.send_timeout_secs, self._check_unread, self._written_bytes)

    def _check_unread(self, due_bytes: int) -> None:
        """Disconnect the client if it has not read the first `due_bytes`, written before the timeout started."""
        if self._written_bytes - self._transport.get_write_buffer_size() >= due_bytes:
            self._await_reader()                        # wait for the bytes written since
        elif not any(open_call.timer for open_call in self._sending):  # else that timer disconnects the client
            self._inflight.warn_of(self._client.peer())
            self._client.disconnect()
