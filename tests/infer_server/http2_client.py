"""HTTP/2 client that sends and reads frame by frame, as a test tells it."""
from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType

from infer_server.protos.grpc_framing import prefix_of
from infer_server.protos.http2 import (
    ConnectionClosed,
    DataReceived,
    Event,
    GoAwayReceived,
    Header,
    NGH2Error,
    ResponseReceived,
    StreamClosed,
    TrailersReceived,
    client_connection,
)
from scripts.testing.numpy_engine import TIMEOUT_SECS

INFER = "/inference.GRPCInferenceService/ModelInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"


def headers(path: str, *more: Header, content_type: bytes = b"application/grpc", method: bytes = b"POST"
            ) -> list[Header]:
    return [(b":method", method), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x"),
            (b"content-type", content_type), (b"te", b"trailers"), *more]


class Http2Client:
    """HTTP/2 connection with blocking calls."""

    def __init__(self, port: int, window_bytes: int = 1 << 20, connected: socket.socket | None = None) -> None:
        """Connect to the port, or use the socket `connected`."""
        self.socket = connected or socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECS)
        self.http2 = client_connection(window_bytes)
        self.events: list[Event] = []
        self.is_closed = False                      # the server has closed the connection
        self.send()

    def __enter__(self) -> Http2Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.socket.close()

    def send(self) -> None:
        try:
            if data := self.http2.data_to_send():
                self.socket.settimeout(TIMEOUT_SECS)
                self.socket.sendall(data)
        except (OSError, NGH2Error):                # the server has ended the connection: read() says so
            return

    def call(self, path: str, message: bytes | None = b"", *more: Header, pieces: int = 0) -> int:
        """Start a gRPC call; return its stream. message: None sends none. pieces: size in bytes of each DATA frame."""
        stream = self.http2.send_request(headers(path, *more), end_stream=message is None)
        if message is not None:
            data = prefix_of(len(message)) + message
            for at in range(0, len(data), pieces or len(data)):
                piece = data[at:at + (pieces or len(data))]
                self.http2.send_data(stream, piece, end_stream=at + len(piece) == len(data))
                self.send()
        self.send()
        return stream

    def request(self, fields: Sequence[Header], body: bytes = b"", *, ended: bool = True) -> int:
        """Send an HTTP request; return its stream. ended: the request's body is complete."""
        stream = self.http2.send_request(fields, end_stream=ended and not body)
        if body:
            self.http2.send_data(stream, body, end_stream=ended)
        self.send()
        return stream

    def read(self, secs: float = TIMEOUT_SECS) -> bool:
        """Read the next frames, if any arrive within this time."""
        self.socket.settimeout(secs)
        try:
            data = self.socket.recv(1 << 20)
        except TimeoutError:
            return False
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return False
        with suppress(NGH2Error):                   # frames after the last GOAWAY
            self.http2.receive_data(data)
        self.events += self.http2.events()
        self.send()
        return True

    def until(self, *kinds: type[Event], secs: float = TIMEOUT_SECS) -> Event | None:
        """Read until an event of one of these kinds; return None if the connection closes or the time is over."""
        end, at = time.monotonic() + secs, 0
        while True:
            for event in self.events[at:]:
                if isinstance(event, kinds):
                    return event
            at = len(self.events)
            if self.is_closed or (left := end - time.monotonic()) <= 0:
                return None
            self.read(left)

    def answer(self, stream: int, secs: float = TIMEOUT_SECS) -> tuple[dict[bytes, bytes], bytes]:
        """Read until a stream has ended; return the response's headers and trailers, and its data."""
        end = time.monotonic() + secs
        while not any(isinstance(event, StreamClosed) and event.stream_id == stream for event in self.events):
            if self.is_closed or time.monotonic() > end or not self.read(max(0.001, end - time.monotonic())):
                raise AssertionError(f"stream {stream} has no answer: {self.kinds()}")
        fields: dict[bytes, bytes] = {}
        data = b""
        for event in self.events:
            if isinstance(event, (ResponseReceived, TrailersReceived)) and event.stream_id == stream:
                fields |= dict(_pairs(event.headers))
            elif isinstance(event, DataReceived) and event.stream_id == stream:
                data += event.data
        return fields, data

    def went_away(self, secs: float = TIMEOUT_SECS) -> tuple[int, bytes] | None:
        """Read until GOAWAY or the connection's end; return the error code and the debug data."""
        found = self.until(GoAwayReceived, ConnectionClosed, secs=secs)
        return (found.error_code, found.debug_data) if isinstance(found, (GoAwayReceived, ConnectionClosed)) else None

    def waits_for_close(self, secs: float = TIMEOUT_SECS) -> bool:
        """Read until the server has closed the connection."""
        end = time.monotonic() + secs
        while not self.is_closed and (left := end - time.monotonic()) > 0:
            self.read(left)
        return self.is_closed

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def _pairs(fields: Sequence[Header]) -> Iterable[tuple[bytes, bytes]]:
    return ((field[0], field[1]) for field in fields)
