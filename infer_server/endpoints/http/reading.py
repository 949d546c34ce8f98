"""Requests of HTTP/1.1 out of the pieces that a connection receives: httptools parses, whole requests are handed on.

What their headers and bodies may have is bounded while they come, not when they are there.
"""
from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple, Protocol
from urllib.parse import unquote

import httptools

from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, error_response, response_of
from infer_server.endpoints.http.transports import LARGE_BYTES
from infer_server.endpoints.inflight import Client, Inflight, OpenCall
from infer_server.errors import MemoryLimitError
from infer_server.protocol.parameters import digits

MOST_HEADER_BYTES = 64 << 10
_JSON_BYTES = "inference-header-content-length"     # there where a body is not all JSON
_ORIGIN = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)       # where a client names the server in the request's line
_KEPT_BYTES = 2048              # of a head
_SPECIAL = {"transfer-encoding", "expect"}      # headers of requests that come in pieces, or wait
HEADER_SECS = 10.0              # for a client to say what it wants, once it has begun to
IDLE_SECS = 120.0               # for it to begin on a connection that stays open, and between the pieces of a body


@dataclass(frozen=True)
class Limits:
    """Of a listening port."""
    message_bytes: int          # of a body, also when it is decompressed
    inflight: Inflight


class RefusedError(Exception):
    """What comes is not taken."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(response.status.phrase)
        self.response = response


class Receiver(Client, Protocol):
    """Whose requests are read."""

    def received(self, request: HttpRequest, held: OpenCall, keep_alive: bool) -> None:
        """A whole request. held: what counts its bytes, to be ended by who takes it."""

    def go_on(self) -> None:
        """The client waits to be told that its body is wanted."""

    def receive_body(self, size: int, begun: Sequence[bytes | bytearray | memoryview]) -> None:
        """All that comes now is a body of that size, which has begun: to be handed to `end_of_body`, whole."""

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
    body: list[bytes | bytearray] = field(default_factory=list)
    body_bytes: int = 0
    expected_bytes: int = 0             # of the body, as it says; more once more has come
    held: OpenCall | None = None        # once its headers are there
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

    def feed(self, data: bytes) -> None:
        """Raises RefusedError: the data are no request, or too large a one; where the next one begins is not known."""
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
        if missing >= LARGE_BYTES and "transfer-encoding" not in incoming.headers:
            begun, incoming.body = [*incoming.body, rest], []
            self._receiver.receive_body(incoming.expected_bytes, begun)
        elif rest:
            self._feed(rest)
        if self._incoming.awaited_secs:
            self._receiver.watch(self._incoming.awaited_secs)
            self._incoming.awaited_secs = 0.0

    def _feed(self, data: bytes | memoryview) -> None:
        while data:
            incoming = self._incoming
            rest = self._parse(data)
            if self._incoming is incoming and incoming.held is None:
                incoming.unfinished_bytes += len(data)      # the parser tells of a header once all of it is there
                if incoming.unfinished_bytes > MOST_HEADER_BYTES:
                    raise _too_long_a_head()
            data = rest

    def end_of_body(self, body: bytearray) -> None:
        """Hands the request on whose body this is. The parser, which has not seen all of it, is done with."""
        self._incoming.body = [body]
        self.on_message_complete()
        self._parser = httptools.HttpRequestParser(self)

    def _parse(self, data: bytes | memoryview) -> bytes | memoryview:
        """What is left to be parsed: the parser stops behind a request for another protocol."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            offset: int = upgrade.args[0]
            return data[offset:]
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, RefusedError):
                raise
            raise cause from None
        except httptools.HttpParserError as error:
            raise RefusedError(error_response(HTTPStatus.BAD_REQUEST, f"not an HTTP request: {error}")) from error
        return b""

    def drop(self) -> None:
        """Forgets the request that is being received."""
        if self._incoming.held:
            self._limits.inflight.end(self._incoming.held)
        self._incoming = _Incoming()

    # ---- httptools' callbacks
    def on_message_begin(self) -> None:
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

    def on_headers_complete(self) -> None:
        headers = self._incoming.headers
        coding, length = headers.get("transfer-encoding", ""), headers.get("content-length", "0")
        if coding.strip().lower() not in ("", "chunked"):
            raise _not_served(f"Transfer-Encoding '{coding}' is not served; send chunked, or none")
        # Other protocols are not taken up, and HTTP/1.1 goes on, but the parser takes a body for the other protocol's.
        if self._parser.should_upgrade() and (coding or length.strip("0") or self._parser.get_method() == b"CONNECT"):
            raise _not_served("no other protocol than HTTP/1.1 is served here; send it without Upgrade")
        self._expect(digits(length) or 0)
        self._incoming.awaited_secs = IDLE_SECS
        if headers.get("expect", "").lower() == "100-continue":
            self._receiver.go_on()

    def on_body(self, body: bytes) -> None:
        incoming = self._incoming
        incoming.awaited_secs = IDLE_SECS
        incoming.body.append(body)
        incoming.body_bytes += len(body)
        if incoming.body_bytes > incoming.expected_bytes:
            self._expect(incoming.body_bytes)

    def on_message_complete(self) -> None:
        incoming, self._incoming = self._incoming, _Incoming()
        held = incoming.held
        assert held is not None
        self._receiver.watch(None)
        path = _ORIGIN.sub(b"", incoming.url).partition(b"?")[0].decode("latin-1")
        body = incoming.body[0] if len(incoming.body) == 1 else b"".join(incoming.body)
        request = HttpRequest(self._parser.get_method().decode("latin-1"), unquote(path) if "%" in path else path,
                              incoming.headers, body, incoming.received_ns, self._parser.get_http_version())
        self._remember(request)
        self._receiver.received(request, held, self._parser.should_keep_alive())

    def _expect(self, count: int) -> None:
        """There will be a body of so many bytes, or there are that many already."""
        incoming, most, inflight = self._incoming, self._limits.message_bytes, self._limits.inflight
        if count > most:
            what = "request" if _JSON_BYTES in incoming.headers else "request JSON"
            raise RefusedError(error_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                                              f"{what} size of {count} bytes exceeds the maximum allowed input size of "
                                              f"{most} bytes. Use --http-max-input-size to increase the limit. "
                                              "(Of both protocols: --max-message-mib.)"))
        try:
            if incoming.held is None:
                incoming.held = inflight.begin(self._receiver, count)
            else:
                inflight.hold(incoming.held, count - incoming.expected_bytes)
        except MemoryLimitError as error:
            raise RefusedError(response_of(error)) from error
        incoming.expected_bytes = count


def _not_served(why: str) -> RefusedError:
    return RefusedError(error_response(HTTPStatus.NOT_IMPLEMENTED, why))


def _too_long_a_head() -> RefusedError:
    return RefusedError(error_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                                       f"more than {MOST_HEADER_BYTES} bytes of headers"))
