"""Client end of an HTTP/2 connection that carries gRPC calls, without I/O.

A blocking socket (clients/channels/blocking.py) or an asyncio transport (clients/channels/aio.py) does the I/O.
"""
from __future__ import annotations

import math
import time
from dataclasses import dataclass

from infer_server.clients.channels.call import CallRequest, PendingCall
from infer_server.clients.channels.status import StatusError, deadline_exceeded
from infer_server.protos.http2 import (
    ConnectionClosed,
    DataReceived,
    ErrorCode,
    GoAwayReceived,
    Header,
    NGH2Error,
    ResponseReceived,
    SettingsReceived,
    StreamClosed,
    TrailersReceived,
    client_connection,
)

_WINDOW_BYTES = 4 << 20             # flow-control window of a stream
_SEND_BYTES = 256 << 10             # maximum size of a write


@dataclass
class Keepalive:
    """Keepalive settings: seconds of silence before a ping, which servers can lengthen, and timeout of the ping."""
    secs: float
    timeout_secs: float


class ClientConnection:
    """Calls on a connection. Open ones end with UNAVAILABLE when it is lost."""

    def __init__(self, keepalive: Keepalive) -> None:
        self._http2 = client_connection(_WINDOW_BYTES)
        self._keepalive = keepalive
        self._received_at = time.monotonic()
        self._pinged_at: float | None = None
        self.calls: dict[int, PendingCall] = {}     # by stream number
        self.is_ready = False                       # the server's settings have come: it speaks HTTP/2
        self.takes_calls = True                     # False after GOAWAY
        self._farewell = ""                         # the reason that it gave
        self._plain_headers: tuple[Header, ...] = ()    # of the last response whose headers say only that it begins

    def open(self, request: CallRequest, call: PendingCall) -> None:
        """Begin a call: queue its request. Raises StatusError if the connection accepts no more calls."""
        http2 = self._http2
        try:
            call.stream = stream = http2.send_request(request.headers)
        except NGH2Error as error:                  # the server sent GOAWAY, or all stream numbers are used
            self.takes_calls = False
            raise StatusError("UNAVAILABLE", str(error), is_unprocessed=True) from error
        for part in request.data[:-1]:
            http2.send_data(stream, part)
        http2.send_data(stream, request.data[-1], end_stream=True)
        if not self.calls:
            self._received_at = time.monotonic()    # silence counts while calls are open
        self.calls[stream] = call

    def cancel(self, call: PendingCall) -> None:
        """Reset the stream of a call, which ends without an error."""
        if self.calls.pop(call.stream, None):
            self._http2.reset_stream(call.stream, ErrorCode.CANCEL)

    def receive(self, data: memoryview) -> None:
        """Process received bytes. Calls end with their streams, or all of them if the bytes are not HTTP/2."""
        try:
            self._http2.receive_data(data)
            self._handle_events()
        except NGH2Error as error:
            self.lose(f"the server does not speak HTTP/2: {error}")
        self._received_at, self._pinged_at = time.monotonic(), None

    def data_to_send(self) -> bytes:
        """Return the next bytes that the windows allow to send; empty if there are none."""
        try:
            if not (data := self._http2.data_to_send(_SEND_BYTES)):
                self._handle_events()               # the last data may have been a GOAWAY
            return data
        except NGH2Error as error:
            self.lose(str(error))
            return b""

    def go_away(self) -> None:
        """Send GOAWAY."""
        self.takes_calls = False
        try:
            self._http2.terminate_connection()
        except NGH2Error:                           # GOAWAY was already sent
            return

    def lose(self, reason: str) -> None:
        """End all calls: the connection is lost."""
        self.takes_calls = False
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.end(StatusError("UNAVAILABLE", reason + self._farewell))

    def check(self) -> float:
        """End calls whose deadlines have passed, and ping a server that has been silent.

        Calls end with UNAVAILABLE if a ping is not answered in time. Returns the time.monotonic() of the next check, or
        infinity.
        """
        now, following = time.monotonic(), math.inf
        for call in list(self.calls.values()):
            if call.deadline <= now:
                self.cancel(call)
                call.end(deadline_exceeded())
            else:
                following = min(following, call.deadline)
        return min(following, self._check_silence(now))

    def _check_silence(self, now: float) -> float:
        if not self.calls:
            return math.inf
        if self._pinged_at is None:
            if (due := self._received_at + self._keepalive.secs) > now:
                return due
            self._http2.ping()
            self._pinged_at = now
        if (due := self._pinged_at + self._keepalive.timeout_secs) <= now:
            self.lose(f"the server did not answer a keepalive ping for {self._keepalive.timeout_secs:g} s")
            return math.inf
        return due

    def _handle_events(self) -> None:
        calls = self.calls
        for event in self._http2.events():
            if isinstance(event, ResponseReceived):
                if (event.end_stream or event.headers != self._plain_headers) and (
                        call := calls.get(event.stream_id)) and call.begin(event.headers, event.end_stream):
                    self._plain_headers = event.headers
            elif isinstance(event, DataReceived):
                if call := calls.get(event.stream_id):
                    call.receive(event.data)
                    if call.error:
                        self.cancel(call)
                        call.end()
            elif isinstance(event, TrailersReceived):
                if call := calls.get(event.stream_id):
                    call.finish(event.headers)
            elif isinstance(event, StreamClosed):
                if call := calls.pop(event.stream_id, None):
                    call.close(event.error_code)
            elif isinstance(event, SettingsReceived):
                self.is_ready = True
            elif isinstance(event, GoAwayReceived):
                self.takes_calls = False
                if event.error_code:
                    if event.debug_data == b"too_many_pings":
                        self._keepalive.secs *= 2
                    self._farewell = f" [HTTP/2 error {event.error_code}: {_text(event.debug_data)}]"
            elif isinstance(event, ConnectionClosed):
                self.lose(f"the connection ended with HTTP/2 error {event.error_code}: {_text(event.debug_data)}")


def _text(debug_data: bytes) -> str:
    return debug_data.decode(errors="replace") or "no reason is given"


def require_http2(protocol: str | None) -> None:
    """Raise ConnectionError unless TLS has negotiated HTTP/2 (ALPN)."""
    if protocol != "h2":
        raise ConnectionError("the server speaks no HTTP/2 over TLS (ALPN)")
