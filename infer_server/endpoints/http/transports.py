"""What an HTTP connection's transport does beside reading and writing pieces: it takes a large body, finds out whether
a client is there that sends no more, and ends the connection of one that does not read."""
from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from typing import Protocol

from infer_server.endpoints.inflight import Client, Inflight, OpenCall

LARGE_BYTES = 64 << 10          # that are yet to come
_FIRST_SECS = 0.1               # an answer that is as quick comes alone; every next wait is twice as long
_INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"

# A bytearray of whatever its memory holds: to zero it first costs as much as a copy.
_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_bytearray.argtypes, _bytearray.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object


class Owner(Protocol):
    """Whose transport it borrows: HttpConnection."""

    def body_grows(self, count: int) -> bool:
        """`count` more bytes of it have come. False: it is not taken, and what comes next is the owner's."""

    def body_received(self, body: bytearray) -> None:
        """All of it has. The transport is to be taken back."""

    def eof_received(self) -> bool: ...

    def connection_lost(self, reason: Exception | None) -> None: ...

    def resume_writing(self) -> None: ...


class LargeBody(asyncio.BufferedProtocol):
    """A large body of a request: the socket writes it where it stays, and no piece of it is copied or parsed. Has a
    connection's transport until the body is whole. Then it forgets the body: uvloop's transport may go on
    referring to it, for as long as the connection lives."""

    def __init__(self, owner: Owner, size: int, begun: Sequence[bytes | bytearray | memoryview]) -> None:
        """begun: what has come of its bytes."""
        self._owner = owner
        self._body: bytearray = _bytearray(None, size)
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
        return self._owner.eof_received()           # what came before the body may have an answer to come

    def connection_lost(self, reason: Exception | None) -> None:
        self._owner.connection_lost(reason)

    def resume_writing(self) -> None:
        self._owner.resume_writing()


class HalfClosed:
    """Asks a client that has closed its direction, and has an answer to come, whether it is there, until that begins:
    to TCP one that says that it sends no more looks like one that has gone.

    It is sent interim responses, which clients of HTTP/1.1 pass over. Who has gone resets the connection at the first,
    and the next one finds that out. https://www.rfc-editor.org/rfc/rfc9110#section-15.2
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop, self._transport = loop, transport
        self._secs = _FIRST_SECS
        self._timer = loop.call_later(self._secs, self._ask)

    def cancel(self) -> None:
        """To be called when its answer begins, or it has gone."""
        self._timer.cancel()

    def _ask(self) -> None:
        self._transport.write(_INTERIM)
        self._secs *= 2
        self._timer = self._loop.call_later(self._secs, self._ask)


class Outlet:
    """What is written to a client, and is held until the socket has taken it: for so long as a client may take to read
    an answer, however small it is, for a client may ask for any number of them."""

    def __init__(self, transport: asyncio.Transport, inflight: Inflight, client: Client) -> None:
        """client: whose transport it is."""
        self._transport, self._inflight, self._client = transport, inflight, client
        self._loop = asyncio.get_running_loop()
        self._sending: list[OpenCall] = []                      # written, and not yet taken
        self._written_bytes = 0
        self._unread: asyncio.TimerHandle | None = None         # while there are some of these
        transport.set_write_buffer_limits(high=0)       # so that resume_writing says when all has been taken

    def write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        if len(data) > LARGE_BYTES and not self._transport.can_write_eof():
            # TLS does not tell of what it has handed on to the socket's own buffer. While that is full it hands on
            # nothing more, and tells of the last byte.
            self._transport.write(memoryview(data)[:-1])
            data = data[-1:]
        self._transport.write(data)

    def sent(self, held: OpenCall, body_bytes: int) -> None:
        """All of an answer, or of a piece of one, was written: it is held until the socket has taken it."""
        if self._transport.get_write_buffer_size():
            self._sending.append(held)
            self._inflight.answered(held, body_bytes)
            if not self._unread:
                self._await_reader()
        else:
            self._inflight.end(held)

    def taken(self) -> None:
        """The socket has taken all that was written, or takes nothing more."""
        if self._unread:
            self._unread.cancel()
            self._unread = None
        for held in self._sending:
            self._inflight.end(held)
        self._sending.clear()

    def _await_reader(self) -> None:
        self._unread = self._loop.call_later(self._inflight.send_timeout_secs, self._look, self._written_bytes)

    def _look(self, due_bytes: int) -> None:
        """due_bytes: how many were written by when the client was given its time."""
        if self._written_bytes - self._transport.get_write_buffer_size() >= due_bytes:
            self._await_reader()                        # for what was written since
        elif not any(held.timer for held in self._sending):     # it, too, would end the connection
            self._inflight.warn_of(self._client.peer())
            self._client.disconnect()
