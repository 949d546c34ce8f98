"""What an HTTP connection's transport does beside reading and writing pieces: it takes a large body, and finds out
whether a client is there that sends no more."""
from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from typing import Protocol

LARGE_BYTES = 64 << 10          # that are yet to come
_FIRST_SECS = 0.1               # an answer that is as quick comes alone; every next wait is twice as long
_INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"

# A bytearray of whatever its memory holds: to zero it first costs as much as a copy.
_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_bytearray.argtypes, _bytearray.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object


class Owner(Protocol):
    """Whose transport it borrows: HttpConnection."""

    def body_grows(self) -> None:
        """More of it has come."""

    def body_received(self, body: bytearray) -> None:
        """All of it has. The transport is to be taken back."""

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
        if self._missing:
            self._owner.body_grows()
        else:
            body, self._body, self._missing = self._body, bytearray(), memoryview(b"")
            self._owner.body_received(body)

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
