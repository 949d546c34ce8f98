"""Link between the engine process and a frontend worker: frames over a Unix socket in both directions.

A frame has a head of fixed size, the client's address, metadata (`about`) and the payload. Frames received together are
processed in one turn of the event loop, and those written in one turn are sent together (uvloop gathers writes). Large
payloads are received into their final buffer. Both ends run the same code, so frames are not validated.
"""
from __future__ import annotations

import asyncio
import struct
from abc import abstractmethod
from typing import NamedTuple, cast

# Kinds of frames, and their senders: a frontend worker (F), the engine process (E).
SETTINGS, READY, FAILED, DRAIN, LOG = range(5)      # E: settings; F: listening; F: failure; E: end; F: log record
INFER, HTTP = 5, 6                                  # F: a ModelInferRequest, an HTTP request
LEFT_INFER, LEFT_HTTP = 7, 8                        # F: its client has disconnected
ANSWER, FAIL = 9, 10                                # E: to INFER: the response; an error status
RESPONSE, BEGIN, PART, END = 11, 12, 13, 14         # E: to HTTP: the whole response; or its head, pieces and end
COUNTED = 0x80                                      # E: flag of ANSWER and RESPONSE: bytes are counted until ...
READ = 15                                           # F: ... the client has read the response
STREAM, MESSAGE, ALL_SENT, LEFT_STREAM = 16, 17, 18, 19         # F: another gRPC call: path, request, end, disconnect
CONSUMED, STREAMED, ENDED = 20, 21, 22              # E: a request was consumed; a response; the final status
WRITTEN = 23                                        # F: a response was written to the client
SEND_AWAY, SENT_AWAY = 24, 25                       # E: send GOAWAY to clients; F: done

WINDOW = 32                     # flow control of a stream: most unconsumed requests, and most unwritten responses
WINDOW_BYTES = 64 << 10         # bytes of unconsumed requests from which no more are forwarded

_HEAD = struct.Struct("<IIHBQqd")
_BUFFER_BYTES = 256 << 10           # initial size; it grows for long metadata
_LARGE_BYTES = 64 << 10             # payloads of at least this size are not copied
NEVER = -1.0


class Frame(NamedTuple):
    """Message of the link."""
    kind: int
    number: int                     # number of the call, assigned by the worker
    payload: bytes                  # or a bytearray, never modified, if it was received in pieces
    about: bytes = b""              # metadata
    peer: bytes = b""               # the client's address
    received_ns: int = 0
    remaining_secs: float = NEVER   # until the client's deadline


class Link(asyncio.BufferedProtocol):
    """One end of the link. Not thread-safe: belongs to the event loop."""
    _transport: asyncio.WriteTransport

    def __init__(self) -> None:
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._filled = 0
        self._large: Frame | None = None        # frame whose large payload is being received
        self._large_filled = 0

    @abstractmethod
    def received(self, frame: Frame) -> None: ...

    @abstractmethod
    def closed(self, reason: Exception | None) -> None:
        """Handle the end of the link. reason: the exception that ended it; None if the other end closed it."""

    def send(self, kind: int, number: int = 0, *payload: bytes | bytearray | memoryview, about: bytes = b"",
             peer: bytes = b"", received_ns: int = 0, remaining_secs: float = NEVER) -> None:
        """Send a frame, whose payload is the concatenation of pieces. Does nothing if the other end is gone."""
        size = sum(map(len, payload))
        head = _HEAD.pack(size, len(about), len(peer), kind, number, received_ns, remaining_secs) + peer + about
        if size < _LARGE_BYTES:
            self._transport.write(b"".join((head, *payload)))
        else:
            self._transport.writelines((head, *payload))

    # ---- asyncio's
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)      # uvloop's class does not derive from it

    def connection_lost(self, reason: Exception | None) -> None:
        self.closed(reason)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large:
            return memoryview(self._large.payload)[self._large_filled:]
        if self._filled == len(self._view):     # the head and metadata of one frame fill the buffer
            full, self._view = self._view, memoryview(bytearray(2 * len(self._view)))
            self._view[:self._filled] = full
        return self._view[self._filled:]

    def buffer_updated(self, count: int) -> None:
        if frame := self._large:
            self._large_filled += count
            if self._large_filled == len(frame.payload):
                self._large = None
                self.received(frame)
            return
        at, self._filled = 0, self._filled + count
        while at + _HEAD.size <= self._filled and (end := self._take(at)):
            at = end
        self._filled -= at
        if at and self._filled:
            self._view[:self._filled] = self._view[at:at + self._filled]

    def _take(self, at: int) -> int:
        """Process the frame at an offset of the buffer; return the offset of its end, or 0 if it is incomplete.

        If the payload is large or does not fit into the buffer, it gets a buffer of its own, and the frame counts as
        processed up to the received bytes.
        """
        size, about, peer, kind, number, received_ns, remaining_secs = _HEAD.unpack_from(self._view, at)
        begin = at + _HEAD.size
        middle = begin + peer
        start = middle + about
        if start > self._filled:
            return 0
        end: int = start + size
        rest = bytes(self._view[middle:start]), bytes(self._view[begin:middle]), received_ns, remaining_secs
        if end <= self._filled:
            self.received(Frame(kind, number, bytes(self._view[start:end]), *rest))
            return end
        if size < _LARGE_BYTES and end - at <= len(self._view):
            return 0
        payload = bytearray(size)
        self._large_filled = self._filled - start
        payload[:self._large_filled] = self._view[start:self._filled]
        self._large = Frame(kind, number, cast(bytes, payload), *rest)
        return self._filled
