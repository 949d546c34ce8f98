"""The parts of gRPC's protocol over HTTP/2 that its client and its server share: messages, timeouts, status texts.

References
----------
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""
from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from infer_server.protos.buffers import uninitialised

PREFIX_BYTES = 5                # prefix of a message: a flag, and its length as a 32-bit big-endian integer
_FIRST_BYTES = 1 << 20          # first size of a message's buffer, whatever length the prefix announces
# Decimal digits and a unit; microseconds per unit.
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_MICROSECONDS = {b"H": 3.6e9, b"M": 6e7, b"S": 1e6, b"m": 1e3, b"u": 1.0, b"n": 1e-3}
_MOST_DIGITS = 10 ** 8


class MessageTooLargeError(Exception):
    """A message announces more bytes than its receiver takes."""

    def __init__(self, size: int, max_bytes: int) -> None:
        super().__init__(f"Received message larger than max ({size} vs. {max_bytes})")


@functools.lru_cache(1024)
def prefix_of(size: int, is_compressed: bool = False) -> bytes:
    """Return the prefix of a message of `size` bytes."""
    return (b"\1" if is_compressed else b"\0") + size.to_bytes(4)


class MessageReader:
    """Splits the data of a stream into messages.

    Parameters
    ----------
    max_bytes : the largest message; `feed` raises MessageTooLargeError as soon as a prefix announces more.
    """
    __slots__ = ("_max_bytes", "_prefix", "_size", "_buffer", "_view", "_filled", "_is_compressed")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefix = b""                          # the part of a prefix that has arrived
        self._size = -1                             # size of the message being received; -1: the prefix is incomplete
        self._buffer = bytearray()
        self._view = memoryview(self._buffer)       # bytearray[i:j] = bytes copies the bytes twice
        self._filled = 0
        self._is_compressed = False

    @property
    def is_between(self) -> bool:
        """True if no message has arrived in part."""
        return self._size < 0 and not self._prefix

    def append(self, data: bytes) -> bool:
        """Take `data` if it is a piece of a large message that has begun and does not end; return True if so."""
        filled = self._filled + len(data)
        if self._size <= filled or filled > len(self._buffer):
            return False
        self._view[self._filled:filled] = data
        self._filled = filled
        return True

    def feed(self, data: bytes) -> Sequence[tuple[bytes | bytearray, bool]]:
        """Return the messages that `data` completes, each with True if it is compressed."""
        messages: list[tuple[bytes | bytearray, bool]] = []
        at, end = 0, len(data)
        while at < end or self._size == 0:
            if self._size < 0:
                missing = PREFIX_BYTES - len(self._prefix)
                self._prefix += data[at:at + missing]
                at += missing
                if len(self._prefix) < PREFIX_BYTES:
                    break
                self._begin()
                continue
            count = min(end - at, self._size - self._filled)
            if count == self._size:                 # the whole message is in this piece
                messages.append((data[at:at + count], self._is_compressed))
                self._size = -1
            else:
                self._fill(data, at, count)
                if self._filled == self._size:
                    messages.append((self._buffer, self._is_compressed))
                    self._grow(0)
                    self._size = -1
            at += count
        return messages

    def _begin(self) -> None:
        self._is_compressed, self._size = self._prefix[0] != 0, int.from_bytes(self._prefix[1:])
        self._prefix, self._filled = b"", 0
        if self._size > self._max_bytes:
            raise MessageTooLargeError(self._size, self._max_bytes)

    def _fill(self, data: bytes, at: int, count: int) -> None:
        """Copy a piece of the message, whose buffer grows with what has arrived."""
        filled = self._filled + count
        if filled > len(self._buffer):
            self._grow(min(self._size, max(_FIRST_BYTES, 2 * filled)))
        self._view[self._filled:filled] = data if count == len(data) else memoryview(data)[at:at + count]
        self._filled = filled

    def _grow(self, size: int) -> None:
        larger = uninitialised(size)
        view = memoryview(larger)
        if size:
            view[:self._filled] = self._view[:self._filled]
        self._buffer, self._view = larger, view


def timeout_secs(text: bytes) -> float | None:
    """Return the seconds of a grpc-timeout header; None if it is malformed."""
    match = _TIMEOUT.fullmatch(text)
    return int(match[1]) * _MICROSECONDS[match[2]] / 1e6 if match else None


def timeout_text(secs: float) -> bytes:
    """Return the grpc-timeout header for a number of seconds, in the finest unit that has room for it."""
    for unit, microseconds in reversed(_MICROSECONDS.items()):
        if (count := max(0, round(secs * 1e6 / microseconds))) < _MOST_DIGITS:
            return b"%d%s" % (count, unit)
    return b"%dH" % (_MOST_DIGITS - 1)


def percent_encoded(text: str) -> bytes:
    """Return a status text as the grpc-message header carries it."""
    if text.isascii() and text.isprintable() and "%" not in text:
        return text.encode()
    return b"".join(b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
                    for byte in text.encode(errors="replace"))


def percent_decoded(value: bytes) -> str:
    """Return the text of a grpc-message header."""
    return unquote_to_bytes(value).decode(errors="replace")


def binary_value(value: bytes) -> bytes:
    """Return the bytes of a header whose name ends with -bin, which may lack its padding. Raises ValueError."""
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def binary_text(value: bytes) -> bytes:
    """Return the header of a name that ends with -bin."""
    return base64.b64encode(value).rstrip(b"=")
