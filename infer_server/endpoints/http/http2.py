"""HTTP/2 on the HTTP port: each stream has a request, which is answered as one over HTTP/1.1 is.

References
----------
https://www.rfc-editor.org/rfc/rfc9113
"""
from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

from infer_server.endpoints.http.exchange import Exchange, Handler
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, joined, path_of, response_of
from infer_server.endpoints.http.reading import IDLE_SECS, PortLimits, RefusedError, dispatch
from infer_server.endpoints.http2.connection import Http2Connection, Sending, Shared
from infer_server.endpoints.http2.settings import ConnectionSettings
from infer_server.endpoints.inflight import OpenCall
from infer_server.errors import MemoryLimitError, ServeError
from infer_server.protocol.parameters import digits
from infer_server.protos.http2 import ErrorCode, Header

_MAX_STREAMS = 256                  # most concurrent streams on a connection
_MAX_EARLY_PINGS = 100              # less than a second after the one before, between two answers


def settings_of(limits: PortLimits) -> ConnectionSettings:
    """Return the settings of a connection to the HTTP port: pings are allowed, idle connections are closed."""
    return ConnectionSettings(limits.message_bytes, _MAX_STREAMS, IDLE_SECS, keepalive_without_calls=True,
                              min_ping_interval_secs=1.0, max_ping_strikes=_MAX_EARLY_PINGS,
                              min_body_rate=limits.min_body_rate, body_grace_secs=limits.body_grace_secs)


class Http2Requests(Http2Connection):
    """A connection whose streams are requests. Belongs to the event loop."""

    def __init__(self, shared: Shared, handle: Handler, limits: PortLimits) -> None:
        super().__init__(shared)
        self.handle, self.limits = handle, limits
        self._headers: tuple[Header, ...] = ()                  # headers of the last request, which _request parses
        self._request = HttpRequest("", "")

    def peer_of(self, name: Any) -> str:
        return f"{name[0]}:{name[1]}" if name else "a client"

    def begin(self, stream: int, headers: tuple[Header, ...], ended: bool) -> None:
        if headers != self._headers:
            self._headers, self._request = headers, _request_of(headers)
        begun = self.streams[stream] = RequestStream(self, stream, self._request)
        if ended:
            begun.receive(b"", True)
        else:
            begun.expect()

    def respond(self, stream: int, response: HttpResponse, is_head: bool, ended: bool) -> None:
        """Send a whole response. is_head: without its body. ended: the client has sent all of its request."""
        headers = [(b":status", b"%d" % response.status.value), (b"content-length", b"%d" % response.body_bytes)]
        if response.body:
            headers.append((b"content-type", response.content_type.encode("latin-1")))
        headers += ((name.lower().encode("latin-1"), value.encode("latin-1"))
                    for name, value in response.headers.items())
        pieces = () if is_head else response.body
        if not pieces:
            self.answer_with(stream, headers, ended)
        elif self._transport:
            with Sending(self):
                self._http2.send_response(stream, headers)
                for piece in pieces:
                    self._http2.send_data(stream, piece)
                self._http2.end_stream(stream)
                if not ended:
                    self.reset_when_sent(stream)
            self.sending()

    def start(self, stream: int, headers: tuple[Header, ...]) -> None:
        """Send the headers of a response whose body follows."""
        if self._transport:
            with Sending(self):
                self._http2.send_response(stream, headers)

    def inform(self, stream: int, status: HTTPStatus) -> None:
        """Send an interim response."""
        with Sending(self):
            self._http2.send_informational_response(stream, ((b":status", b"%d" % status.value),))
        self.flush_soon()

    def finish(self, stream: int) -> None:
        """Send the end of a body."""
        if self._transport:
            with Sending(self):
                self._http2.end_stream(stream)
            self.sending()

    def reset(self, stream: int) -> None:
        """End a stream at once."""
        with Sending(self):
            self._http2.reset_stream(stream, ErrorCode.ENHANCE_YOUR_CALM)
        self.flush_soon()


class RequestStream:
    """A request and its response: a http2.Stream, the connection of an Exchange, and a client of Inflight."""

    def __init__(self, connection: Http2Requests, stream: int, request: HttpRequest) -> None:
        """request: without its body."""
        self._connection, self._stream = connection, stream
        self._request = request._replace(received_ns=time.monotonic_ns())
        self._body: bytes | bytearray = b""
        self._ended = self._refused = False                     # the client has sent everything; it has its answer
        self._open_call: OpenCall | None = None                 # counts the request and its answer
        self._unsent: list[OpenCall] = []                       # count the pieces of an answer that are not sent
        self.exchange: Exchange | None = None                   # the exchange being answered
        self.answered_at, self.is_partial, self.partial_bytes = 0.0, False, 0

    # ---- inflight.Client
    def peer(self) -> str:
        return self._connection.peer

    def disconnect(self) -> None:
        self._connection.abort()

    # ---- http2.Stream
    def expect(self) -> None:
        """Check the announced length, once the headers of a request with a body have arrived."""
        headers = self._request.headers
        try:
            self._connection.limits.check_announced(headers, digits(headers.get("content-length", "0")) or 0)
        except RefusedError as refused:
            self._refuse(refused.response)
            return
        self.is_partial = True
        self._connection.watch_partial()
        if headers.get("expect", "").lower() == "100-continue":
            self._connection.inform(self._stream, HTTPStatus.CONTINUE)

    def receive(self, data: bytes, is_last: bool) -> None:
        connection, size = self._connection, len(data)
        connection.acknowledge(self._stream, size)
        self._ended = is_last
        if self._refused or self.exchange:
            return
        inflight = connection.inflight
        try:
            if self._open_call is None:
                self._open_call = inflight.begin(self, 0)
            if size:
                inflight.receive(self._open_call, size, is_last)
                self.partial_bytes += size
                self._body = joined(self._body, data)
                connection.limits.check_size(self._request.headers, len(self._body))
        except MemoryLimitError as error:
            self.fail(error)
        except RefusedError as refused:
            self._refuse(refused.response)
        else:
            if is_last:
                inflight.complete(self._open_call)
                self._take(self._open_call)

    def _take(self, open_call: OpenCall) -> None:
        connection, self.is_partial = self._connection, False
        request, self._body = self._request._replace(body=self._body), b""
        self.exchange = Exchange(self, request, open_call)
        dispatch(self.exchange, connection.limits, connection.handle)

    def fail(self, error: Exception) -> None:
        assert isinstance(error, ServeError)
        self._refuse(response_of(error))

    def _refuse(self, response: HttpResponse) -> None:
        """Answer a request that has not arrived completely."""
        self._refused, self.is_partial, self._body = True, False, b""
        if self._open_call:                                     # the client need not close the stream to free the body
            self._connection.inflight.end(self._open_call)
        self.answered_at = self._connection.loop.time()
        self._connection.respond(self._stream, response, False, self._ended)

    def close(self) -> None:
        exchange, self.exchange = self.exchange, None
        self.sent()
        if self._open_call:
            self._connection.inflight.end(self._open_call)
        if exchange:
            exchange.leave()
        self._refused, self._body = True, b""

    # ---- exchange.Connection
    def respond(self, exchange: Exchange, response: HttpResponse) -> None:
        self._connection.inflight.keep(exchange.open_call, response.body_bytes)
        self._answered(exchange)
        self._connection.respond(self._stream, response, exchange.request.method == "HEAD", self._ended)

    def begin(self, content_type: str, chunked: bool) -> None:
        self._connection.start(self._stream, (
            (b":status", b"200"), (b"content-type", content_type.encode("latin-1")), (b"cache-control", b"no-store")))

    def part(self, piece: bytes) -> None:
        connection = self._connection
        try:
            open_call = connection.inflight.begin(self, len(piece))
        except MemoryLimitError:
            connection.reset(self._stream)
            return
        self._unsent.append(open_call)
        if connection.write(self._stream, piece, self):
            self.sent()
        elif not self.answered_at:
            self.answered_at = connection.loop.time()

    def sent(self) -> None:
        """Count the pieces of the answer no more: all are sent."""
        for open_call in self._unsent:
            self._connection.inflight.end(open_call)
        self._unsent.clear()
        self.answered_at = 0.0

    def end(self, exchange: Exchange) -> None:
        self._answered(exchange)
        self._connection.finish(self._stream)

    def _answered(self, exchange: Exchange) -> None:
        self.exchange = exchange.left = None
        self._refused = True
        self.answered_at = self._connection.loop.time()


def _request_of(headers: tuple[Header, ...]) -> HttpRequest:
    """Return the request that the headers of a stream begin, without a body."""
    fields: dict[str, str] = {}
    method = target = authority = b""
    for name, value in headers:
        if name == b":method":
            method = value
        elif name == b":path":
            target = value
        elif name == b":authority":
            authority = value
        elif not name.startswith(b":"):
            fields[name.decode("latin-1")] = value.decode("latin-1")
    if authority:                               # goes before a host, as RFC 9113 has it
        fields["host"] = authority.decode("latin-1")
    return HttpRequest(method.decode("latin-1"), path_of(target), fields, version="2")
