"""A large body of a request: the socket writes it where it stays, and no piece of it is copied or parsed."""
from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from typing import Protocol

LARGE_BYTES = 64 << 10          # that are yet to come

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
    """Has a connection's transport until the body is whole. Then it forgets the body: uvloop's transport may go on
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
