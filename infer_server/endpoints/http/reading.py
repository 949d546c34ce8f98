"""Requests of HTTP/1.1 out of the pieces that a connection receives: httptools parses, whole requests are handed on.

What their headers and bodies may have is bounded while they come, not when they are there. Bytes count when they have
arrived; a body that arrives more slowly than the minimum rate is refused (408), as nginx and Apache do.
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
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, error_response, path_of, response_of
from infer_server.endpoints.http.transports import LARGE_BYTES
from infer_server.endpoints.inflight import Client, Inflight, OpenCall
from infer_server.errors import MemoryLimitError, NotServedError
from infer_server.protocol.compression import WINDOW, inflated
from infer_server.protocol.parameters import digits

MOST_HEADER_BYTES = 64 << 10
_MOST_HEADERS = 256
_SLICE_BYTES = 4 << 10          # parsed at a time: hundreds of requests or chunks, which is a few milliseconds
_JSON_BYTES = "inference-header-content-length"     # there where a body is not all JSON
_ORIGIN = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)       # where a client names the server in the request's line
_KEPT_BYTES = 2048              # of a head
_SPECIAL = {"transfer-encoding", "expect"}      # headers of requests that come in pieces, or wait
HEADER_SECS = 10.0              # for a client to say what it wants, once it has begun to
IDLE_SECS = 120.0               # for it to begin on a connection that stays open, and between the pieces of a body


class RefusedError(Exception):
    """What comes is not taken."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(response.status.phrase)
        self.response = response


@dataclass(frozen=True)
class Limits:
    """Of a listening port."""
    message_bytes: int          # of a body, also when it is decompressed
    inflight: Inflight
    json_bytes: int = 64 << 20          # of the JSON in a body
    min_body_rate: int = 500            # bytes per second, on average over each grace period; 0: any
    body_grace_secs: float = 10.0

    def most_bytes(self, headers: Mapping[str, str]) -> int:
        """Return the limit of a body with these headers, in bytes: it is JSON unless they say otherwise."""
        return self.message_bytes if _JSON_BYTES in headers else min(self.message_bytes, self.json_bytes)

    def check_size(self, headers: Mapping[str, str], count: int) -> None:
        """Raise RefusedError if no body with these headers may have `count` bytes."""
        most = self.most_bytes(headers)
        if count > most:
            what = "request" if _JSON_BYTES in headers else "request JSON"
            option = "--http-max-json-mib" if most < self.message_bytes else "--http-max-input-size"
            raise RefusedError(error_response(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{what} size of {count} bytes exceeds the maximum allowed input "
                f"size of {most} bytes. Use {option} to increase the limit. (Of both protocols: --max-message-mib.)"))

    def check_announced(self, headers: Mapping[str, str], count: int) -> None:
        """Raise RefusedError if a body of `count` bytes, which these headers announce, is not taken now."""
        self.check_size(headers, count)
        if count > self.inflight.max_partial_bytes:
            raise RefusedError(error_response(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request of {count} bytes exceeds the "
                f"{self.inflight.max_partial_bytes} bytes that all requests on their way may hold "
                "(--max-inflight-mib)"))
        try:
            self.inflight.check_room(count)
        except MemoryLimitError as error:
            raise RefusedError(response_of(error)) from error


async def decompress(exchange: Exchange, coding: str, limits: Limits, handle: Handler) -> None:
    """Decompress the body of an exchange, and hand it on. coding: its Content-Encoding. Raises ServeErrors."""
    inflight, request, coding = limits.inflight, exchange.request, coding.strip().lower()
    if coding not in ("", "identity"):
        if coding not in WINDOW:
            raise NotServedError(f"Content-Encoding '{coding}' is not served; send {', '.join(WINDOW)} or none")
        body = await inflight.inflate(exchange.while_present(inflated(
            request.body, coding, limits.most_bytes(request.headers), partial(inflight.hold, exchange.held))))
        exchange.request = request._replace(body=body)
    handle(exchange)


class Receiver(Client, Protocol):
    """Whose requests are read."""

    def received(self, request: HttpRequest, held: OpenCall, keep_alive: bool) -> None:
        """A whole request. held: what counts its bytes, to be ended by who takes it."""

    def go_on(self) -> None:
        """The client waits to be told that its body is wanted."""

    def receive_body(self, size: int, begun: Sequence[bytes | bytearray | memoryview]) -> None:
        """All that comes now is a body of that size, which has begun: to be handed to `end_of_body`, whole. Pieces of
        it are counted by `body_grew`."""

    @property
    def is_full(self) -> bool:
        """True if no more requests are to be parsed until resume()."""

    def watch(self, secs: float | None) -> None:
        """More must come in so many seconds; None: none is awaited."""


@dataclass(slots=True)
class _Incoming:
    """A request of which not all has come."""
    received_ns: int = 0
    url: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    head_bytes: int = 0
    unfinished_bytes: int = 0           # received without an end of the headers
    is_headed: bool = False             # its headers are complete
    body: bytes | bytearray = b""       # in one piece, however small the pieces are that it came in
    body_bytes: int = 0
    expected_bytes: int = 0             # of the body, as it says
    most_bytes: int = 0                 # that the body may have
    counted_bytes: int = 0              # of all of it, in flight
    held: OpenCall | None = None        # what counts them; once some are counted
    window_ends: float = 0.0            # of the current grace period, by time.monotonic()
    window_bytes: int = 0               # of the body that came before it
    awaited_secs: float = 0.0           # for more of it, after what came last; 0: nothing came that counts


class _Known(NamedTuple):
    """A request that came whole and alone, in one piece."""
    head: bytes                         # up to its body
    size: int                           # with that
    request: HttpRequest


class RequestReader:
    """Belongs to the event loop."""

    def __init__(self, limits: Limits, receiver: Receiver) -> None:
        self._limits, self._receiver = limits, receiver
        self._parser = httptools.HttpRequestParser(self)
        self._incoming = _Incoming()
        self._fed = b""                             # what the parser is given, if it begins with a request
        self._known: _Known | None = None           # the last of these: with the same head, another says the same
        self._unparsed = b""                        # received while the receiver was full

    def feed(self, data: bytes) -> None:
        """Raises RefusedError: the data are no request, or too large a one; where the next one begins is not known."""
        if self._unparsed:
            self._unparsed += data
            return
        known, is_between = self._known, self._incoming.received_ns == 0
        if known and is_between and len(data) == known.size and data.startswith(known.head):
            self._take_again(known, data)
        elif is_between and len(data) >= LARGE_BYTES:
            head = data.find(b"\r\n\r\n") + 4       # the parser would copy what it is given of a body
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

    def _take_again(self, known: _Known, data: bytes) -> None:
        body = data[len(known.head):]
        try:
            held = self._limits.inflight.begin(self._receiver, len(body))
        except MemoryLimitError as error:
            raise RefusedError(response_of(error)) from error
        self._receiver.watch(None)
        self._receiver.received(known.request._replace(body=body, received_ns=time.monotonic_ns()), held, True)

    def _remember(self, request: HttpRequest) -> None:
        """Keeps what has just been parsed, if it is all that was fed, and its body is what follows its head."""
        fed = self._fed
        end = fed.find(b"\r\n\r\n") + 4
        if (4 <= end <= _KEPT_BYTES and len(fed) - end == len(request.body) and fed.startswith(request.method.encode())
                and not request.headers.keys() & _SPECIAL and not self._parser.should_upgrade()
                and self._parser.should_keep_alive()):
            self._known = _Known(fed[:end], len(fed), request._replace(body=b""))

    def _go_on(self, rest: bytes | memoryview) -> None:
        """With what has come behind the headers: it is parsed, unless a large body begins, or goes on, with it."""
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
        """Parses in slices, until the receiver is full."""
        while data:
            if self._receiver.is_full:
                self._unparsed = bytes(data)
                return
            incoming = self._incoming
            piece = data if len(data) <= _SLICE_BYTES else memoryview(data)[:_SLICE_BYTES]
            parsed_bytes = self._parse(piece)
            if self._incoming is incoming and not incoming.is_headed:
                incoming.unfinished_bytes += parsed_bytes   # the parser tells of a header once all of it is there
                if incoming.unfinished_bytes > MOST_HEADER_BYTES:
                    raise _too_long_a_head()
            data = memoryview(data)[parsed_bytes:] if parsed_bytes < len(data) else b""

    def _count(self, incoming: _Incoming) -> None:
        """Counts what has arrived of a request that is not complete. Raises RefusedError."""
        arrived_bytes = incoming.unfinished_bytes + incoming.body_bytes
        if arrived_bytes > incoming.counted_bytes:
            inflight = self._limits.inflight
            try:
                if incoming.held is None:
                    incoming.held = inflight.begin(self._receiver, 0)
                inflight.receive(incoming.held, arrived_bytes - incoming.counted_bytes)
            except MemoryLimitError as error:
                raise RefusedError(response_of(error)) from error
            incoming.counted_bytes = arrived_bytes

    def body_grew(self, count: int) -> None:
        """Counts bytes of a body that the receiver takes (receive_body). Raises RefusedError."""
        self._incoming.body_bytes += count
        self._count(self._incoming)

    def too_slow(self, is_waiting: bool) -> RefusedError | None:
        """Return the refusal of a request whose body has arrived too slowly during the last grace period.

        is_waiting: the connection is not read, or an answer is awaited on it: a new period begins.
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
        """Hands the request on whose body this is. The parser, which has not seen all of it, is done with."""
        self._incoming.body = body
        self.on_message_complete()
        self._parser = httptools.HttpRequestParser(self)

    def _parse(self, data: bytes | memoryview) -> int:
        """Returns how many bytes were parsed: the parser stops behind a request for another protocol."""
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
        """Forgets the request that is being received."""
        if self._incoming.held:
            self._limits.inflight.end(self._incoming.held)
        self._incoming = _Incoming()
        self._unparsed = b""

    # ---- httptools' callbacks
    def on_message_begin(self) -> None:
        if self._incoming.held:                 # of blank lines
            self._limits.inflight.end(self._incoming.held)
        self._incoming = _Incoming(time.monotonic_ns(), awaited_secs=HEADER_SECS)

    def on_url(self, url: bytes) -> None:
        incoming = self._incoming
        incoming.url += url
        incoming.head_bytes += len(url)
        if incoming.head_bytes > MOST_HEADER_BYTES:
            raise _too_long_a_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        incoming = self._incoming
        key, said = name.decode("latin-1").lower(), value.decode("latin-1")
        if key == "transfer-encoding" and key in incoming.headers:
            said = f"{incoming.headers[key]}, {said}"           # lines of one name are one list
        incoming.headers[key] = said
        incoming.head_bytes += len(name) + len(value)
        if incoming.head_bytes > MOST_HEADER_BYTES:
            raise _too_long_a_head()
        if len(incoming.headers) > _MOST_HEADERS:
            raise RefusedError(error_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                                              f"more than {_MOST_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        headers = self._incoming.headers
        coding, length = headers.get("transfer-encoding", ""), headers.get("content-length", "0")
        if coding.strip().lower() not in ("", "chunked"):
            raise _not_served(f"Transfer-Encoding '{coding}' is not served; send chunked, or none")
        # Other protocols are not taken up, and HTTP/1.1 goes on, but the parser takes a body for the other protocol's.
        if self._parser.should_upgrade() and (coding or length.strip("0") or self._parser.get_method() == b"CONNECT"):
            raise _not_served("no other protocol than HTTP/1.1 is served here; send it without Upgrade")
        self._expect(digits(length) or 0)
        if headers.get("expect", "").lower() == "100-continue":
            self._receiver.go_on()

    def on_body(self, body: bytes) -> None:
        incoming = self._incoming
        incoming.awaited_secs = IDLE_SECS
        if not incoming.body:
            incoming.body = body
        elif isinstance(incoming.body, bytearray):
            incoming.body += body
        else:
            incoming.body = bytearray(incoming.body) + body
        incoming.body_bytes += len(body)
        if incoming.body_bytes > incoming.most_bytes:           # chunked
            self._limits.check_size(incoming.headers, incoming.body_bytes)

    def on_message_complete(self) -> None:
        incoming, self._incoming = self._incoming, _Incoming()
        held = self._held(incoming)
        self._receiver.watch(None)
        body = incoming.body
        request = HttpRequest(self._parser.get_method().decode("latin-1"), path_of(_ORIGIN.sub(b"", incoming.url)),
                              incoming.headers, body, incoming.received_ns, self._parser.get_http_version())
        self._remember(request)
        self._receiver.received(request, held, self._parser.should_keep_alive())

    def _held(self, incoming: _Incoming) -> OpenCall:
        """Returns what counts a request that has arrived completely. Raises RefusedError."""
        inflight, held = self._limits.inflight, incoming.held
        try:
            if held is None:
                return inflight.begin(self._receiver, incoming.body_bytes)
            inflight.complete(held)
            inflight.hold(held, incoming.body_bytes - incoming.counted_bytes)      # without the headers
        except MemoryLimitError as error:
            if held:
                inflight.end(held)
            raise RefusedError(response_of(error)) from error
        return held

    def _expect(self, count: int) -> None:
        """The headers are complete, and announce a body of `count` bytes."""
        incoming = self._incoming
        self._limits.check_announced(incoming.headers, count)
        incoming.is_headed, incoming.expected_bytes, incoming.awaited_secs = True, count, IDLE_SECS
        incoming.most_bytes = self._limits.most_bytes(incoming.headers)
        incoming.window_ends = time.monotonic() + self._limits.body_grace_secs


def _not_served(why: str) -> RefusedError:
    return RefusedError(error_response(HTTPStatus.NOT_IMPLEMENTED, why))


def _too_long_a_head() -> RefusedError:
    return RefusedError(error_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                                       f"more than {MOST_HEADER_BYTES} bytes of headers"))
