"""HTTP/1.1 on an asyncio transport; the requests of a connection are answered one at a time.

A request is dispatched when it is complete (reading.py). Pipelined requests wait in order of arrival, and the socket is
not read while one waits.

https://www.rfc-editor.org/rfc/rfc9112
"""
from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

from infer_server.endpoints.http.exchange import Exchange, Handler
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse
from infer_server.endpoints.http.reading import (
    HEADER_SECS,
    IDLE_SECS,
    PortLimits,
    RefusedError,
    RequestReader,
    dispatch,
)
from infer_server.endpoints.http.transports import HalfClosed, LargeBody, Outlet
from infer_server.endpoints.inflight import OpenCall
from infer_server.errors import MemoryLimitError

_LINGER_SECS = 2.0              # time for the client to read the last response before the connection is closed
_SILENCE_SECS = 0.1             # silence after which a client over asyncio's TLS is assumed to send nothing more
_CHECK_SECS = 2.0               # interval between checks of the timeouts; no longer than the shortest
_MAX_WAITING = 32               # pipelined requests; later bytes are parsed when these are answered
_PARSING_SECS = 0.001           # parsing time before control returns to the event loop


class _Waiting(NamedTuple):
    """Complete request that waits for the response to an earlier one of its connection."""
    request: HttpRequest
    open_call: OpenCall
    keep_alive: bool


class HttpConnection(asyncio.Protocol):
    """HTTP/1.1 connection of a client."""

    def __init__(self, handle: Handler, limits: PortLimits, connections: set[HttpConnection]) -> None:
        """Create a connection that adds itself to the set of open connections, and removes itself at its end."""
        self._handle, self._limits, self._connections = handle, limits, connections
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(limits, self)
        self._check_secs = min(_CHECK_SECS, limits.body_grace_secs)
        self._transport: asyncio.Transport | None = None
        self._outlet: Outlet | None = None                      # set while there is a transport
        self._waiting: deque[_Waiting] = deque()                # pipelined requests behind the current one
        self._timer: asyncio.TimerHandle | None = None          # set while a timeout is running
        self._closes_at = math.inf                              # timeout, on the loop's clock
        self._peer = ""
        self._keep_alive = True
        self._has_begun = False                                 # a streamed response has begun
        self._chunked = False                                   # True if the body is sent in chunked coding
        self._awaits_go_on = False                              # the client waits for 100 Continue
        self._has_ended = False                                 # received bytes are discarded
        self._silence: asyncio.TimerHandle | None = None        # closes a TLS connection after the last response
        self._parses_until = 0.0                                # by time.monotonic()
        self._half_closed: HalfClosed | None = None             # set if the client closed its direction
        self._refusal: HttpResponse | None = None               # error response to send after the pending ones
        self.exchange: Exchange | None = None                   # exchange being answered

    # ---- the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)      # uvloop's class does not derive from it
        self._outlet = Outlet(transport, self._limits.inflight, self)
        self._connections.add(self)
        name = transport.get_extra_info("peername")
        self._peer = f"{name[0]}:{name[1]}" if name else "a client"
        self.watch(HEADER_SECS)

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            self._go_on_lingering()
            return
        self._parses_until = time.monotonic() + _PARSING_SECS
        try:
            self._reader.feed(data)
        except RefusedError as refused:
            self._refuse(refused.response)
        self._parse_later()

    def _parse_later(self) -> None:
        """Pause reading until the received bytes are parsed."""
        if self._reader.has_unparsed and self._transport:
            self._transport.pause_reading()
            if not self._waiting:               # else parsing resumes after the last of these
                self._loop.call_soon(self._parse_on)

    def _parse_on(self) -> None:
        self._parses_until = time.monotonic() + _PARSING_SECS
        try:
            self._reader.resume()
        except RefusedError as refused:
            self._refuse(refused.response)
        if self._reader.has_unparsed:
            self._parse_later()
        elif not self._waiting and self._transport:
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """Return True to keep the connection open for the response to a request received before the end of input."""
        exchange, transport = self.exchange, self._transport
        if exchange and transport and exchange.request.version == "1.1" and not self._has_begun and (
                transport.can_write_eof()):         # TLS has no half-closed connections
            self._half_closed = HalfClosed(self._loop, transport)
        return self._half_closed is not None

    def connection_lost(self, reason: Exception | None) -> None:
        for timer in (self._timer, self._silence, self._half_closed):
            if timer:
                timer.cancel()
        self.resume_writing()
        self._connections.discard(self)
        self._drop_waiting()
        self._reader.drop()
        exchange, self.exchange = self.exchange, None
        if exchange:
            self._limits.inflight.end(exchange.open_call)
            exchange.leave()
        self._transport = self._outlet = None

    def resume_writing(self) -> None:
        if self._outlet:
            self._outlet.taken()

    def close(self) -> None:
        """Close the connection when all responses have been sent."""
        if self._transport:
            self._transport.close()

    # ---- inflight.Client
    def peer(self) -> str:
        return self._peer

    def disconnect(self) -> None:
        if self._transport:
            self._transport.abort()

    # ---- reading.Receiver
    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= _MAX_WAITING or time.monotonic() > self._parses_until

    def go_on(self) -> None:
        self._awaits_go_on = self.exchange is not None or bool(self._waiting)
        if self._transport and not self._awaits_go_on:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def receive_body(self, size: int, begun: Sequence[bytes | bytearray | memoryview]) -> None:
        if self._transport:
            self._transport.set_protocol(LargeBody(self, size, begun))

    def received(self, request: HttpRequest, open_call: OpenCall, keep_alive: bool) -> None:
        self._awaits_go_on = False
        if self._has_ended:
            self._limits.inflight.end(open_call)
        elif self.exchange is None and not self._waiting:
            self._take(request, open_call, keep_alive)
        else:
            self._waiting.append(_Waiting(request, open_call, keep_alive))
            if self._transport:
                self._transport.pause_reading()

    # ---- transports.Owner
    def body_grows(self, count: int) -> bool:
        if not self._has_ended:
            try:
                self._reader.body_grew(count)
                self.watch(IDLE_SECS)
                return True
            except RefusedError as refused:
                self._refuse(refused.response)
        self._go_on_lingering()
        if self._transport:
            self._transport.set_protocol(self)
        return False

    def body_received(self, body: bytearray) -> None:
        if self._transport:
            self._transport.set_protocol(self)
            self._reader.end_of_body(body)

    # ---- a request
    def _take(self, request: HttpRequest, open_call: OpenCall, keep_alive: bool) -> None:
        self._keep_alive = keep_alive
        self.exchange = Exchange(self, request, open_call)
        dispatch(self.exchange, self._limits, self._handle)

    def respond(self, exchange: Exchange, response: HttpResponse) -> None:
        """Send the response of an exchange and continue with the next pipelined request."""
        outlet = self._open_outlet
        outlet.write(b"".join((response.head(self._keep_alive, version=exchange.request.version),
                               *(() if exchange.request.method == "HEAD" else response.body))))
        outlet.sent(exchange.open_call, response.body_bytes)
        self._answered(exchange)

    def begin(self, content_type: str, chunked: bool) -> None:
        """Send the head of a streamed response. chunked: use chunked coding; else the body ends with the connection."""
        self._has_begun, self._chunked, self._keep_alive = True, chunked, self._keep_alive and chunked
        if self._half_closed:
            self._half_closed.cancel()
        head = HttpResponse(content_type=content_type)
        self._open_outlet.write(head.head(
            self._keep_alive, "Transfer-Encoding: chunked" if chunked else "Cache-Control: no-store"))

    def part(self, piece: bytes) -> None:
        """Send a piece of a body. A client that does not read is disconnected when the memory limit is reached."""
        try:
            open_call = self._limits.inflight.begin(self, len(piece))
        except MemoryLimitError:
            self.disconnect()
            return
        outlet = self._open_outlet
        outlet.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
        outlet.sent(open_call, len(piece))

    def end(self, exchange: Exchange) -> None:
        """Send the end of a streamed body and continue with the next pipelined request."""
        outlet = self._open_outlet
        if self._chunked:
            outlet.write(b"0\r\n\r\n")
        outlet.sent(exchange.open_call, 0)
        self._answered(exchange)

    @property
    def _open_outlet(self) -> Outlet:
        assert self._outlet is not None
        return self._outlet

    def _answered(self, exchange: Exchange) -> None:
        """Finish an exchange whose response is written, and start the next pipelined request or close."""
        transport = self._transport
        assert transport is not None and exchange is self.exchange
        self.exchange, exchange.left, self._has_begun = None, None, False
        if self._half_closed:
            self._half_closed.cancel()
        if self._keep_alive:
            self.watch(IDLE_SECS)
        else:
            self._end()
            return
        if self._waiting:
            self._loop.call_soon(self._next)        # not a direct call: the recursion would be as deep as the queue
        elif self._refusal:
            self._send_last(self._refusal)
        elif self._half_closed:
            self._end()
        elif self._awaits_go_on:
            self.go_on()

    def _next(self) -> None:
        if self._transport and self.exchange is None and self._waiting:
            self._take(*self._waiting.popleft())
            if not self._waiting:
                self._parse_on()

    def _refuse(self, response: HttpResponse) -> None:
        """Send an error response after the pending ones, and close: the start of the next request is unknown."""
        self._reader.drop()
        if self.exchange or self._waiting:
            self._refusal = response
        elif not self._has_ended:       # else a response with Connection: close was the last one
            self._send_last(response)
        self._has_ended = True

    def _send_last(self, response: HttpResponse) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.write(b"".join((response.head(keep_alive=False), *response.body)))
            self._end()

    def _end(self) -> None:
        """Close our direction, and discard what the client sends for a while.

        Closing the socket while bytes arrive would reset the connection, and the client could lose the response.
        """
        assert self._transport is not None
        self._has_ended = True
        if self._half_closed:
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        elif isinstance(self._loop, asyncio.BaseEventLoop):     # closing asyncio's TLS resets a client that still sends
            self._silence = self._loop.call_later(_SILENCE_SECS, self.close)
        else:                                                   # uvloop's TLS sends its end and reads on by itself
            self._transport.close()
            return
        if self._waiting:
            self._drop_waiting()
            self._transport.resume_reading()
        self.watch(_LINGER_SECS)

    def _go_on_lingering(self) -> None:
        if self._silence:
            self._silence.cancel()
            self._silence = self._loop.call_later(_SILENCE_SECS, self.close)

    def _drop_waiting(self) -> None:
        for waiting in self._waiting:
            self._limits.inflight.end(waiting.open_call)
        self._waiting.clear()

    def watch(self, secs: float | None) -> None:
        """Close the connection if nothing more is received in `secs` seconds; None disables the timeout.

        One timer checks periodically: setting and cancelling one for each piece would cost more than parsing it.
        """
        self._closes_at = self._loop.time() + secs if secs else math.inf
        if self._timer is None and secs:
            self._timer = self._loop.call_later(min(secs, self._check_secs), self._check_timeout)

    def _check_timeout(self) -> None:
        self._timer = None
        left = self._closes_at - self._loop.time()
        is_waiting = self.exchange is not None or bool(self._waiting)
        if not self._has_ended and (refused := self._reader.too_slow(is_waiting)):
            self._refuse(refused.response)
            return
        if left <= 0 and is_waiting:
            left = _CHECK_SECS              # the client waits for a response
        if left <= 0 and self._transport:
            self._transport.close()
        elif left < math.inf:
            self._timer = self._loop.call_later(min(left, self._check_secs), self._check_timeout)
