"""Incremental reader of HTTP/1.1 requests: parses received bytes with httptools and delivers complete requests.

Limits apply and bytes count as they arrive. A body below the minimum rate is rejected (408), as by nginx and Apache.
"""
from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, Protocol

import httptools

from infer_server.endpoints.http.exchange import Exchange, Handler
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, error_response, joined, path_of, response_of
from infer_server.endpoints.http.transports import LARGE_BYTES
from infer_server.endpoints.inflight import Client, Inflight, OpenCall
from infer_server.errors import MemoryLimitError, NotServedError
from infer_server.protocol.compression import WINDOW, inflated
from infer_server.protocol.parameters import digits

MAX_HEADER_BYTES = 64 << 10
_MAX_HEADERS = 256
_SLICE_BYTES = 4 << 10          # bytes parsed at a time: at most hundreds of requests or chunks, a few milliseconds
_JSON_BYTES = "inference-header-content-length"     # header of a body that is not all JSON
_ORIGIN = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)       # origin in an absolute request target
_MAX_CACHED_HEAD_BYTES = 2048   # maximum size of a head that is cached
_SPECIAL = {"transfer-encoding", "expect"}      # headers of requests that are not cached
HEADER_SECS = 10.0              # time to complete the headers of a request
IDLE_SECS = 120.0               # time to begin a request on an open connection, and between pieces of a body


class RefusedError(Exception):
    """The received bytes are rejected; `response` is the error response."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(response.status.phrase)
        self.response = response


@dataclass(frozen=True)
class PortLimits:
    """Limits of a listening port."""
    message_bytes: int          # maximum size of a body, compressed and decompressed
    inflight: Inflight
    json_bytes: int = 64 << 20          # maximum size of the JSON in a body
    min_body_rate: int = 500            # bytes per second, on average over each grace period; 0: no minimum
    body_grace_secs: float = 10.0

    def max_bytes(self, headers: Mapping[str, str]) -> int:
        """Return the maximum size in bytes of a body with these headers: the limit for JSON if it is all JSON."""
        return self.message_bytes if _JSON_BYTES in headers else min(self.message_bytes, self.json_bytes)

    def check_size(self, headers: Mapping[str, str], count: int) -> None:
        """Raise RefusedError if no body with these headers may have `count` bytes."""
        most = self.max_bytes(headers)
        if count > most:
            what = "request" if _JSON_BYTES in headers else "request JSON"
            option = "--http-max-json-mib" if most < self.message_bytes else "--http-max-input-size"
            raise RefusedError(error_response(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{what} size of {count} bytes exceeds the maximum allowed input "
                f"size of {most} bytes. Use {option} to increase the limit. (Of both protocols: --max-message-mib.)"))

    def check_announced(self, headers: Mapping[str, str], count: int) -> None:
        """Raise RefusedError if a body of `count` bytes, announced by these headers, cannot be accepted now."""
        self.check_size(headers, count)
        if count > self.inflight.max_partial_bytes:
            raise RefusedError(error_response(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request of {count} bytes exceeds the "
                f"{self.inflight.max_partial_bytes} bytes that all requests on their way may hold "
                "(--max-inflight-mib)"))
        try:
            self.inflight.check_capacity(count)
        except MemoryLimitError as error:
            raise RefusedError(response_of(error)) from error


def dispatch(exchange: Exchange, limits: PortLimits, handle: Handler) -> None:
    """Handle a request, after decompressing its body if it is encoded. Errors become its response."""
    try:
        if coding := exchange.request.headers.get("content-encoding", ""):
            exchange.answer_later(_decompress(exchange, coding, limits, handle))
        else:
            handle(exchange)
    except Exception as error:
        exchange.fail(error)


async def _decompress(exchange: Exchange, coding: str, limits: PortLimits, handle: Handler) -> None:
    """Decompress the body of an exchange and dispatch it. coding: its Content-Encoding. Raises ServeErrors."""
    inflight, request, coding = limits.inflight, exchange.request, coding.strip().lower()
    if coding not in ("", "identity"):
        if coding not in WINDOW:
            raise NotServedError(f"Content-Encoding '{coding}' is not served; send {', '.join(WINDOW)} or none")
        body = await inflight.inflate(exchange.while_present(inflated(
            request.body, coding, limits.max_bytes(request.headers), partial(inflight.hold, exchange.open_call))))
        exchange.request = request._replace(body=body)
    handle(exchange)


class Receiver(Client, Protocol):
    """Interface of the receiver of parsed requests: HttpConnection."""

    def received(self, request: HttpRequest, open_call: OpenCall, keep_alive: bool) -> None:
        """Accept a complete request. open_call: counts its bytes; the receiver ends it."""

    def go_on(self) -> None:
        """Send 100 Continue to a client that waits for it."""

    def receive_body(self, size: int, begun: Sequence[bytes | bytearray | memoryview]) -> None:
        """Receive a large body of `size` bytes, of which `begun` has arrived, without the reader.

        The receiver counts pieces by `body_grew` and passes the complete body to `end_of_body`.
        """

    @property
    def is_full(self) -> bool:
        """True if no more requests are to be parsed until resume()."""

    def watch(self, secs: float | None) -> None:
        """Set the timeout for more bytes; None disables it."""


@dataclass(slots=True)
class _Incoming:
    """Request that has not arrived completely."""
    received_ns: int = 0
    url: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    head_bytes: int = 0
    unfinished_bytes: int = 0           # bytes received before the end of the headers
    is_headed: bool = False             # the headers are complete
    body: bytes | bytearray = b""       # the part of the body received so far, contiguous
    body_bytes: int = 0
    expected_bytes: int = 0             # Content-Length
    max_bytes: int = 0                  # maximum size of the body
    counted_bytes: int = 0              # bytes counted as in flight
    open_call: OpenCall | None = None   # counts them; None until some are counted
    window_ends: float = 0.0            # end of the current grace period, by time.monotonic()
    window_bytes: int = 0               # bytes of the body that arrived before the grace period
    awaited_secs: float = 0.0           # timeout to set after the current bytes; 0: leave it


class _CachedHead(NamedTuple):
    """Cached request that arrived in one piece, without another one."""
    head: bytes                         # bytes before the body
    size: int                           # total size, body included
    request: HttpRequest


class RequestReader:
    """Incremental parser of the requests of one connection. Not thread-safe: belongs to the event loop."""

    def __init__(self, limits: PortLimits, receiver: Receiver) -> None:
        self._limits, self._receiver = limits, receiver
        self._parser = httptools.HttpRequestParser(self)
        self._incoming = _Incoming()
        self._fed = b""                             # bytes being parsed, if a request begins at their start
        self._cached: _CachedHead | None = None     # last cached request: an equal head needs no parsing
        self._unparsed = b""                        # received while the receiver was full

    def feed(self, data: bytes) -> None:
        """Parse received bytes.

        Raises RefusedError if they are not a request or exceed a limit; the start of the next request is unknown then.
        """
        if self._unparsed:
            self._unparsed += data
            return
        cached, is_between = self._cached, self._incoming.received_ns == 0
        if cached and is_between and len(data) == cached.size and data.startswith(cached.head):
            self._receive_cached(cached, data)
        elif is_between and len(data) >= LARGE_BYTES:
            head = data.find(b"\r\n\r\n") + 4       # the parser would copy the body
            self._feed(data[:head])
            self._go_on(memoryview(data)[head:])
        else:
            self._fed = data if is_between else b""
            self._feed(data)
            self._go_on(b"")
            self._fed = b""

    @property
    def has_unparsed(self) -> bool:
        return bool(self._unparsed)

    def resume(self) -> None:
        """Parse what was received while the receiver was full. Raises RefusedError, as feed() does."""
        data, self._unparsed = self._unparsed, b""
        if data:
            self._feed(data)
            self._go_on(b"")

    def _receive_cached(self, cached: _CachedHead, data: bytes) -> None:
        body = data[len(cached.head):]
        try:
            open_call = self._limits.inflight.begin(self._receiver, len(body))
        except MemoryLimitError as error:
            raise RefusedError(response_of(error)) from error
        self._receiver.watch(None)
        self._receiver.received(cached.request._replace(body=body, received_ns=time.monotonic_ns()), open_call, True)

    def _remember(self, request: HttpRequest) -> None:
        """Cache a parsed request if it is all that was fed and its body directly follows its head."""
        fed = self._fed
        end = fed.find(b"\r\n\r\n") + 4
        if (4 <= end <= _MAX_CACHED_HEAD_BYTES and len(fed) - end == len(request.body)
                and fed.startswith(request.method.encode()) and not request.headers.keys() & _SPECIAL
                and not self._parser.should_upgrade() and self._parser.should_keep_alive()):
            self._cached = _CachedHead(fed[:end], len(fed), request._replace(body=b""))

    def _go_on(self, rest: bytes | memoryview) -> None:
        """Parse the bytes after the headers, unless they belong to a large body; then the receiver takes it over."""
        incoming = self._incoming
        missing = incoming.expected_bytes - incoming.body_bytes - len(rest)
        if self._unparsed:
            self._unparsed += rest
        elif missing >= LARGE_BYTES and "transfer-encoding" not in incoming.headers:
            begun, incoming.body = [incoming.body, rest], b""
            incoming.body_bytes += len(rest)
            self._count(incoming)
            self._receiver.receive_body(incoming.expected_bytes, begun)
        elif rest:
            self._feed(rest)
        self._count(self._incoming)
        if self._incoming.awaited_secs:
            self._receiver.watch(self._incoming.awaited_secs)
            self._incoming.awaited_secs = 0.0

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse in slices until the receiver is full."""
        while data:
            if self._receiver.is_full:
                self._unparsed = bytes(data)
                return
            incoming = self._incoming
            piece = data if len(data) <= _SLICE_BYTES else memoryview(data)[:_SLICE_BYTES]
            parsed_bytes = self._parse(piece)
            if self._incoming is incoming and not incoming.is_headed:
                incoming.unfinished_bytes += parsed_bytes   # the parser reports a header only when it is complete
                if incoming.unfinished_bytes > MAX_HEADER_BYTES:
                    raise _too_long_a_head()
            data = memoryview(data)[parsed_bytes:] if parsed_bytes < len(data) else b""

    def _count(self, incoming: _Incoming) -> None:
        """Count the bytes of an incomplete request that have arrived. Raises RefusedError."""
        arrived_bytes = incoming.unfinished_bytes + incoming.body_bytes
        if arrived_bytes > incoming.counted_bytes:
            inflight = self._limits.inflight
            try:
                if incoming.open_call is None:
                    incoming.open_call = inflight.begin(self._receiver, 0)
                inflight.receive(incoming.open_call, arrived_bytes - incoming.counted_bytes)
            except MemoryLimitError as error:
                raise RefusedError(response_of(error)) from error
            incoming.counted_bytes = arrived_bytes

    def body_grew(self, count: int) -> None:
        """Count bytes of a body that the receiver takes (receive_body). Raises RefusedError."""
        self._incoming.body_bytes += count
        self._count(self._incoming)

    def too_slow(self, is_waiting: bool) -> RefusedError | None:
        """Return the refusal of a request whose body has arrived too slowly during the last grace period.

        is_waiting: the connection is not read or awaits a response, so that a new period begins.
        """
        incoming, rate, secs = self._incoming, self._limits.min_body_rate, self._limits.body_grace_secs
        now = time.monotonic()
        if not incoming.is_headed or not rate or (now < incoming.window_ends and not is_waiting):
            return None
        is_slow = incoming.body_bytes - incoming.window_bytes < rate * secs and not is_waiting
        incoming.window_ends, incoming.window_bytes = now + secs, incoming.body_bytes
        return RefusedError(error_response(
            HTTPStatus.REQUEST_TIMEOUT, f"the body arrives at less than {rate} bytes per second "
            "(--min-body-rate, --body-grace-secs)")) if is_slow else None

    def end_of_body(self, body: bytearray) -> None:
        """Deliver the request with this body, and replace the parser, which has not seen all of it."""
        self._incoming.body = body
        self.on_message_complete()
        self._parser = httptools.HttpRequestParser(self)

    def _parse(self, data: bytes | memoryview) -> int:
        """Return the number of bytes parsed: the parser stops after a request for a protocol upgrade."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            offset: int = upgrade.args[0]
            return offset
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, RefusedError):
                raise
            raise cause from None
        except httptools.HttpParserError as error:
            raise RefusedError(error_response(HTTPStatus.BAD_REQUEST, f"not an HTTP request: {error}")) from error
        return len(data)

    def drop(self) -> None:
        """Drop the request that is being received."""
        if self._incoming.open_call:
            self._limits.inflight.end(self._incoming.open_call)
        self._incoming = _Incoming()
        self._unparsed = b""

    # ---- httptools' callbacks
    def on_message_begin(self) -> None:
        if self._incoming.open_call:            # counts blank lines before the request
            self._limits.inflight.end(self._incoming.open_call)
        self._incoming = _Incoming(time.monotonic_ns(), awaited_secs=HEADER_SECS)

    def on_url(self, url: bytes) -> None:
        incoming = self._incoming
        incoming.url += url
        incoming.head_bytes += len(url)
        if incoming.head_bytes > MAX_HEADER_BYTES:
            raise _too_long_a_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        incoming = self._incoming
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key == "transfer-encoding" and key in incoming.headers:
            text = f"{incoming.headers[key]}, {text}"           # repeated headers form one list (RFC 9110, 5.3)
        incoming.headers[key] = text
        incoming.head_bytes += len(name) + len(value)
        if incoming.head_bytes > MAX_HEADER_BYTES:
            raise _too_long_a_head()
        if len(incoming.headers) > _MAX_HEADERS:
            raise RefusedError(error_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                                              f"more than {_MAX_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        headers = self._incoming.headers
        coding, length = headers.get("transfer-encoding", ""), headers.get("content-length", "0")
        if coding.strip().lower() not in ("", "chunked"):
            raise _not_served(f"Transfer-Encoding '{coding}' is not served; send chunked, or none")
        # Upgrades are ignored, and HTTP/1.1 continues; but the parser would take a body for the other protocol's data.
        if self._parser.should_upgrade() and (coding or length.strip("0") or self._parser.get_method() == b"CONNECT"):
            raise _not_served("no other protocol than HTTP/1.1 is served here; send it without Upgrade")
        self._expect(digits(length) or 0)
        if headers.get("expect", "").lower() == "100-continue":
            self._receiver.go_on()

    def on_body(self, body: bytes) -> None:
        incoming = self._incoming
        incoming.awaited_secs = IDLE_SECS
        incoming.body = joined(incoming.body, body)
        incoming.body_bytes += len(body)
        if incoming.body_bytes > incoming.max_bytes:            # chunked
            self._limits.check_size(incoming.headers, incoming.body_bytes)

    def on_message_complete(self) -> None:
        incoming, self._incoming = self._incoming, _Incoming()
        open_call = self._open_call(incoming)
        self._receiver.watch(None)
        body = incoming.body
        request = HttpRequest(self._parser.get_method().decode("latin-1"), path_of(_ORIGIN.sub(b"", incoming.url)),
                              incoming.headers, body, incoming.received_ns, self._parser.get_http_version())
        self._remember(request)
        self._receiver.received(request, open_call, self._parser.should_keep_alive())

    def _open_call(self, incoming: _Incoming) -> OpenCall:
        """Return the OpenCall of a complete request. Raises RefusedError."""
        inflight, open_call = self._limits.inflight, incoming.open_call
        try:
            if open_call is None:
                return inflight.begin(self._receiver, incoming.body_bytes)
            inflight.complete(open_call)
            inflight.hold(open_call, incoming.body_bytes - incoming.counted_bytes)  # without the headers
        except MemoryLimitError as error:
            if open_call:
                inflight.end(open_call)
            raise RefusedError(response_of(error)) from error
        return open_call

    def _expect(self, count: int) -> None:
        """Prepare for a body of `count` bytes, which complete headers announce. Raises RefusedError."""
        incoming = self._incoming
        self._limits.check_announced(incoming.headers, count)
        incoming.is_headed, incoming.expected_bytes, incoming.awaited_secs = True, count, IDLE_SECS
        incoming.max_bytes = self._limits.max_bytes(incoming.headers)
        incoming.window_ends = time.monotonic() + self._limits.body_grace_secs


def _not_served(why: str) -> RefusedError:
    return RefusedError(error_response(HTTPStatus.NOT_IMPLEMENTED, why))


def _too_long_a_head() -> RefusedError:
    return RefusedError(error_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                                       f"more than {MAX_HEADER_BYTES} bytes of headers"))
