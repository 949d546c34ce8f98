"""One attempt of a unary call: its request as HTTP/2 frames, and its response from them.

References ---------- https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
https://github.com/grpc/grpc/blob/master/doc/compression.md
"""
from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from typing import NamedTuple, cast

from infer_server.clients.channels.options import ChannelOptions, Message, Metadata
from infer_server.clients.channels.status import STATUSES, StatusError, status_of_http, status_of_reset
from infer_server.protos.grpc_framing import (
    PREFIX_BYTES,
    MessageReader,
    MessageTooLargeError,
    binary_text,
    percent_decoded,
    prefix_of,
    timeout_text,
)
from infer_server.protos.http2 import Header
from infer_server.protos.version import VERSION

NO_LIMIT = -1
_MAX_BYTES = (1 << 32) - 1                          # largest length that the message prefix can hold
_SUCCESS = ((b"grpc-status", b"0"),)
_SMALL_BYTES = 64 << 10                             # larger messages are not copied behind their prefix
_WORTH_BYTES = 1 << 10                              # smaller messages are not compressed
_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


class CallRequest(NamedTuple):
    """Serialised request: the header block, and the stream's data in parts."""
    headers: tuple[Header, ...]
    data: tuple[bytes, ...]


class RequestEncoder:
    """Encoder of a channel's requests."""

    def __init__(self, authority: str, options: ChannelOptions) -> None:
        self._max_bytes = options.max_message_bytes
        self._compresses = options.compression == "gzip"
        fixed = tuple(_header(*pair) for pair in options.metadata)

        @functools.lru_cache(maxsize=256)
        def headers(path: str, timeout: float | None, metadata: Metadata, retries: int, is_compressed: bool
                    ) -> tuple[Header, ...]:
            block = [(b":method", b"POST"), (b":scheme", b"https" if options.tls else b"http"),
                     (b":path", path.encode()), (b":authority", authority.encode()), (b"te", b"trailers"),
                     (b"content-type", b"application/grpc"), (b"user-agent", f"infer-client/{VERSION}".encode()),
                     (b"grpc-accept-encoding", b"identity, deflate, gzip")]
            if timeout is not None:
                block.append((b"grpc-timeout", timeout_text(timeout)))
            if is_compressed:
                block.append((b"grpc-encoding", b"gzip"))
            if retries:
                block.append((b"grpc-previous-rpc-attempts", b"%d" % retries))
            return (*block, *fixed, *(_header(*pair) for pair in metadata))

        self._headers = headers

    def encode(self, path: str, message: Message, timeout: float | None = None, metadata: Metadata = (),
               retries: int = 0) -> CallRequest:
        """Return a request. Raises StatusError if the message is larger than the options allow."""
        size = len(message) if isinstance(message, bytes) else sum(map(len, message))
        if size > self._max_bytes != NO_LIMIT:
            raise StatusError("RESOURCE_EXHAUSTED", f"Sent message larger than max ({size} vs. {self._max_bytes})")
        is_compressed = self._compresses and size >= _WORTH_BYTES
        if is_compressed:
            message = zlib.compress(whole(message), 1, _WINDOW_BITS[b"gzip"])
            size = len(message)
        prefix = prefix_of(size, is_compressed)
        headers = self._headers(path, timeout, metadata, retries, is_compressed)
        if size <= _SMALL_BYTES:
            return CallRequest(headers, (prefix + whole(message),))
        return CallRequest(headers, (prefix, message) if isinstance(message, bytes) else (prefix, *message))


def whole(message: Message) -> bytes:
    """Return a message in one piece."""
    return message if isinstance(message, bytes) else b"".join(message)


def _header(name: str, value: str | bytes) -> Header:
    data = value.encode("latin-1") if isinstance(value, str) else value
    return name.lower().encode("latin-1"), binary_text(data) if name.lower().endswith("-bin") else data


class PendingCall:
    """Response to a request, as it arrives.

    Parameters ---------- max_bytes : maximum size of the message after decompression; NO_LIMIT for any size. done :
    called with this call when it has ended.
    """
    __slots__ = ("stream", "deadline", "is_ended", "error", "_message", "_reader", "_max_bytes", "_done", "_coding",
                 "_has_status")

    def __init__(self, max_bytes: int, done: Callable[[PendingCall], object] | None = None) -> None:
        self.stream = 0
        self.deadline = math.inf                    # at which the connection ends the call, on time.monotonic()
        self.is_ended = False
        self.error: StatusError | None = None       # the rest of the stream can be discarded
        self._message: bytes | bytearray | None = None
        self._max_bytes = _MAX_BYTES if max_bytes == NO_LIMIT else max_bytes
        self._reader: MessageReader | None = None
        self._done = done
        self._coding = b""
        self._has_status = False

    def result(self) -> bytes:
        """Return the message of a call that has ended. Raises StatusError."""
        if error := self.failure():
            raise error
        return cast(bytes, self._message)           # or a bytearray that is no longer modified

    def failure(self) -> StatusError | None:
        """Return the error of a call that has ended; None if it has succeeded."""
        if self.error is None and self._message is None:
            self.error = StatusError("INTERNAL", "the server answered OK without a message")
        return self.error

    def begin(self, headers: tuple[Header, ...], is_last: bool) -> bool:
        """Process the response headers; return True if equal ones need not be processed for other calls."""
        fields = dict(headers)
        if fields[b":status"] != b"200":
            self._fail(status_of_http(int(fields[b":status"])))
        self._coding = fields.get(b"grpc-encoding", b"")
        if is_last:
            self.finish(headers)
        return not (is_last or self.error or self._coding)

    def receive(self, data: bytes) -> None:
        """Process data of the stream."""
        if self._reader is None:
            size = len(data) - PREFIX_BYTES
            if self._message is None and 0 <= size == int.from_bytes(data[1:PREFIX_BYTES]) <= self._max_bytes and (
                    data[0] == 0):
                self._message = data[PREFIX_BYTES:]         # all of it, as most are
                return
            self._reader = MessageReader(self._max_bytes)
        try:
            for message, is_compressed in self._reader.feed(data):
                if self._message is not None:
                    raise StatusError("INTERNAL", "the server answered a unary call with several messages")
                self._message = self._inflated(message) if is_compressed else message
        except MessageTooLargeError as error:
            self._fail(StatusError("RESOURCE_EXHAUSTED", str(error)))
        except StatusError as error:
            self._fail(error)

    def finish(self, trailers: tuple[Header, ...]) -> None:
        """Process the trailers."""
        self._has_status = True
        if trailers != _SUCCESS:
            self._read_status(dict(trailers))

    def close(self, error_code: int) -> None:
        """Note that the stream is closed, which ends the call."""
        if not self._has_status:
            self._fail(status_of_reset(error_code))
        self.end()

    def end(self, error: StatusError | None = None) -> None:
        """End the call, with `error` unless it has failed before."""
        if not self.is_ended:
            self.is_ended = True
            if error:
                self._fail(error)
            if self._done:
                self._done(self)

    def _fail(self, error: StatusError) -> None:
        self.error = self.error or error

    def _read_status(self, fields: dict[bytes, bytes]) -> None:
        try:
            status = STATUSES[int(fields[b"grpc-status"])]
        except (KeyError, ValueError, IndexError):
            self._fail(StatusError("UNKNOWN", f"the server sent no gRPC status: {fields.get(b'grpc-status')!r}"))
            return
        if status != "OK":
            pushback = fields.get(b"grpc-retry-pushback-ms")
            self._fail(StatusError(status, percent_decoded(fields.get(b"grpc-message", b"")), pushback_secs=(
                None if pushback is None else int(pushback) / 1e3 if pushback.isdigit() else -1.0)))

    def _inflated(self, message: bytes | bytearray) -> bytes:
        if self._coding not in _WINDOW_BITS:
            raise StatusError("INTERNAL", f"the server sent a message compressed by {self._coding!r}")
        inflater = zlib.decompressobj(_WINDOW_BITS[self._coding])
        try:
            data = inflater.decompress(message, self._max_bytes + 1)
        except zlib.error as error:
            raise StatusError("INTERNAL", f"the server sent a message that cannot be decompressed: {error}") from error
        if len(data) > self._max_bytes:
            raise StatusError("RESOURCE_EXHAUSTED", f"Received message larger than max ({self._max_bytes}) when "
                                                    "decompressed")
        if not inflater.eof:
            raise StatusError("INTERNAL", "the server sent a compressed message that is cut short")
        return data
