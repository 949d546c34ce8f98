"""Between the process of the engines and a front: frames over a Unix socket, both ways.

A frame is a head of fixed size, the client's address, what is said beside the payload, the payload. Frames that have
come together are taken in one turn of the loop, and those of one turn are sent together (uvloop gathers writes by
itself). A large payload is received where it stays. Both ends are this project's, of one version: what comes is not
checked.
"""
from __future__ import annotations

import asyncio
import struct
from abc import abstractmethod
from typing import NamedTuple, cast

# Kinds of frames, and who sends them: a front (F), the engines' process (E).
SETTINGS, READY, FAILED, DRAIN, LOG = range(5)      # E: Settings; F: it listens; F: why not; E: it is to end; F: a line
INFER, HTTP = 5, 6                                  # F: a ModelInferRequest, an HTTP request
LEFT_INFER, LEFT_HTTP = 7, 8                        # F: nobody waits for its answer any more
ANSWER, FAIL = 9, 10                                # E: of INFER: the response; a status
RESPONSE, BEGIN, PART, END = 11, 12, 13, 14         # E: of HTTP: all of it; or its head, pieces of its body, its end
HELD = 0x80                                         # E: with ANSWER and RESPONSE: it is counted until ...
READ = 15                                           # F: ... its client has it
STREAM, MESSAGE, ALL_SENT, LEFT_STREAM = 16, 17, 18, 19         # F: a ModelStreamInfer, a request of it, ...
TAKEN, STREAMED, ENDED = 20, 21, 22                 # E: it took a request; a response; the status of all of it
WRITTEN = 23                                        # F: it wrote a response
SEND_AWAY, SENT_AWAY = 24, 25                       # E: its clients are to go to other servers; F: they know

WINDOW = 32                     # requests of a stream that are not taken, and responses that are not written, at most
WINDOW_BYTES = 64 << 10         # no more requests are handed on while those that are not taken have so many

_HEAD = struct.Struct("<IIHBQqd")
_BUFFER_BYTES = 256 << 10           # at first: it grows for what is said beside a payload
_LARGE_BYTES = 64 << 10             # payloads that are not copied once more
NEVER = -1.0


class Frame(NamedTuple):
    kind: int
    number: int                     # of the call, which its front gave it
    payload: bytes                  # or a bytearray, which nobody changes, if it came in pieces
    about: bytes = b""              # what is said beside it
    peer: bytes = b""               # the client's address
    received_ns: int = 0
    remaining_secs: float = NEVER   # until the client gives up


class Link(asyncio.BufferedProtocol):
    """One end. Belongs to the event loop."""
    _transport: asyncio.WriteTransport

    def __init__(self) -> None:
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._filled = 0
        self._large: Frame | None = None        # whose payload is being received
        self._large_filled = 0

    @abstractmethod
    def received(self, frame: Frame) -> None: ...

    @abstractmethod
    def closed(self, reason: Exception | None) -> None:
        """The other end is gone, or what it sent was not taken, for that reason."""

    def send(self, kind: int, number: int = 0, *payload: bytes | bytearray | memoryview, about: bytes = b"",
             peer: bytes = b"", received_ns: int = 0, remaining_secs: float = NEVER) -> None:
        """The pieces of the payload, views of bytes among them, follow each other. Does nothing if the other end is
        gone."""
        size = sum(map(len, payload))
        head = _HEAD.pack(size, len(about), len(peer), kind, number, received_ns, remaining_secs) + peer + about
        if size < _LARGE_BYTES:
            self._transport.write(b"".join((head, *payload)))
        else:
            self._transport.writelines((head, *payload))

    # ---- asyncio's
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)      # uvloop's is none by class

    def connection_lost(self, reason: Exception | None) -> None:
        self.closed(reason)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large:
            return memoryview(self._large.payload)[self._large_filled:]
        if self._filled == len(self._view):     # the head of a frame, and what is said beside its payload, alone
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
        """Takes the frame that begins there, or the beginning of a large one, or of one for which there is no room, and
        says where it ends; 0: not enough of it has come."""
        size, about, peer, kind, number, received_ns, remaining_secs = _HEAD.unpack_from(self._view, at)
        begin = at + _HEAD.size
        middle = begin + peer
        start = middle + about
        if start > self._filled:
            return 0
        end: int = start + size
        beside = bytes(self._view[middle:start]), bytes(self._view[begin:middle]), received_ns, remaining_secs
        if end <= self._filled:
            self.received(Frame(kind, number, bytes(self._view[start:end]), *beside))
            return end
        if size < _LARGE_BYTES and end - at <= len(self._view):
            return 0
        payload = bytearray(size)
        self._large_filled = self._filled - start
        payload[:self._large_filled] = self._view[start:self._filled]
        self._large = Frame(kind, number, cast(bytes, payload), *beside)
        return self._filled
