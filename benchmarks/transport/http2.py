"""A closed loop of gRPC calls over a bare HTTP/2 connection, with negligible client cost.

gRPC's clients take longer for a small request than a fast server does, so they would be the bottleneck. Here a request
is encoded once: a header block of a few bytes, which refers to the HPACK table that the first request filled
(RFC 7541), and the message. Only the frames of an answer are read: a call that ended with a message has succeeded.
"""
from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass, field

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_MAX_FRAME_SIZE, _INITIAL_WINDOW_SIZE = 5, 4
_WINDOW = 65535                     # initial flow-control window of a stream and a connection (RFC 9113)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_POST, _HTTP = b"\x83", b"\x86"     # entries of HPACK's static table
_PATH, _AUTHORITY, _CONTENT_TYPE = 4, 1, 31
_FIRST_DYNAMIC = 62
_READ_BYTES = 1 << 20


@dataclass
class Ended:
    """Counts and latencies of the finished calls of a connection."""
    answered: int = 0
    failed: int = 0
    seconds: list[float] = field(default_factory=list)      # latency of each call


@dataclass
class _Stream:
    begun: float
    window: int                     # bytes that may be sent
    sent: int = 0                   # bytes of the message sent so far
    answered: bool = False          # True once a message has arrived


class Connection:
    """Connection with `at_a_time` concurrent calls of one method and message, each replaced when it has ended."""

    def __init__(self, port: int, path: str, message: bytes, at_a_time: int) -> None:
        self._message = struct.pack(">?I", False, len(message)) + message
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._streams: dict[int, _Stream] = {}
        self._next_id = 1
        self._window, self._stream_window, self._max_frame = _WINDOW, _WINDOW, 16384
        self._received = b""
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, (1 << 31) - 1)
        self._out = [_PREFACE, _frame(_SETTINGS, 0, 0, settings),
                     _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", (1 << 31) - 1 - _WINDOW))]
        self._first_block, self._block = _header_blocks(path)
        self._at_a_time = at_a_time
        self._is_sending = True
        self.ended = Ended()

    def run(self, seconds: float) -> Ended:
        """Keep the calls in flight for `seconds`, and return counts and latencies of those that ended."""
        self.ended = Ended()
        while len(self._streams) < self._at_a_time:
            self._begin()
        self._send()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._turn()
        return self.ended

    def close(self) -> None:
        """Wait for the calls that are in flight, then close the connection."""
        self._is_sending = False
        while self._streams:
            self._turn()
        self._socket.close()

    def _turn(self) -> None:
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._received += data
        self._read_frames()
        self._send()

    def _begin(self) -> None:
        block, self._first_block = self._first_block or self._block, b""
        self._out.append(_frame(_HEADERS, _END_HEADERS, self._next_id, block))
        self._streams[self._next_id] = _Stream(time.perf_counter(), self._stream_window)
        self._push(self._next_id)
        self._next_id += 2

    def _push(self, number: int) -> None:
        """Queue the part of a message that the flow-control windows allow."""
        stream, size = self._streams[number], len(self._message)
        while stream.sent < size and (count := min(size - stream.sent, self._max_frame, self._window,
                                                   stream.window)) > 0:
            piece = self._message[stream.sent:stream.sent + count] if count < size else self._message
            stream.sent += count
            stream.window -= count
            self._window -= count
            self._out.append(_frame(_DATA, _END_STREAM if stream.sent == size else 0, number, piece))

    def _send(self) -> None:
        if self._out:
            self._socket.sendall(b"".join(self._out))
            self._out.clear()

    def _read_frames(self) -> None:
        data, at = self._received, 0
        while len(data) - at >= 9:
            length = int.from_bytes(data[at:at + 3])
            begin = at + 9
            if begin + length > len(data):
                break
            kind, flags, number = data[at + 3], data[at + 4], int.from_bytes(data[at + 5:begin])
            at = begin + length
            if kind == _DATA and length:
                self._streams[number].answered = True
            if kind in (_DATA, _HEADERS):
                if flags & _END_STREAM:
                    self._end(number)
            else:
                self._control(kind, flags, number, data[begin:at])
        self._received = data[at:]

    def _end(self, number: int) -> None:
        if stream := self._streams.pop(number, None):
            self.ended.answered += stream.answered
            self.ended.failed += not stream.answered
            self.ended.seconds.append(time.perf_counter() - stream.begun)
            if self._is_sending:
                self._begin()

    def _control(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == _WINDOW_UPDATE:
            more = int.from_bytes(payload)
            if number == 0:
                self._window += more
            elif number in self._streams:
                self._streams[number].window += more
            for waiting in ([number] if number else list(self._streams)):
                if waiting in self._streams:
                    self._push(waiting)
        elif kind == _SETTINGS and not flags & _ACK:
            self._set(payload)
            self._out.append(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._out.append(_frame(_PING, _ACK, 0, payload))
        elif kind == _RST_STREAM:
            self._end(number)
        elif kind == _GOAWAY:
            raise ConnectionError(f"the server ends the connection: {payload[8:]!r}")

    def _set(self, payload: bytes) -> None:
        for identifier, value in struct.iter_unpack(">HI", payload):
            if identifier == _MAX_FRAME_SIZE:
                self._max_frame = value
            elif identifier == _INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
        for number in list(self._streams):
            self._push(number)


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    size = len(payload)
    return struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, number) + payload


def _header_blocks(path: str) -> tuple[bytes, bytes]:
    """Return the header block of the first request, whose fields enter the HPACK table, and that of later ones."""
    named = [(_PATH, path), (_AUTHORITY, "localhost"), (_CONTENT_TYPE, "application/grpc")]
    unnamed = [("te", "trailers"), ("user-agent", "grpc-c/46.0.0 (linux; chttp2)"),
               ("grpc-accept-encoding", "identity, deflate, gzip")]
    literals = [bytes((0x40 | index,)) + _text(value) for index, value in named]
    literals += [b"\x40" + _text(name) + _text(value) for name, value in unnamed]
    # The newest entry has the lowest index.
    indexed = bytes(0x80 | (_FIRST_DYNAMIC + i) for i in reversed(range(len(literals))))
    return _POST + _HTTP + b"".join(literals), _POST + _HTTP + indexed


def _text(value: str) -> bytes:
    return bytes((len(value),)) + value.encode()
