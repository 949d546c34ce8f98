"""Channels on libnghttp2 over blocking sockets: each call in flight has a connection, which is then kept for others."""
from __future__ import annotations

import math
import socket
import ssl
import time
from collections import defaultdict, deque
from contextlib import suppress

from infer_server.clients.channels.addresses import Address, connect_limit
from infer_server.clients.channels.base import ChannelBase
from infer_server.clients.channels.call import CallRequest, PendingCall, RequestEncoder
from infer_server.clients.channels.connection import ClientConnection, Keepalive, require_http2
from infer_server.clients.channels.health import MAX_SECS, HealthCheck, require_healthy
from infer_server.clients.channels.options import ChannelOptions, Message, Metadata
from infer_server.clients.channels.retry import Attempts
from infer_server.clients.channels.status import StatusError, deadline_exceeded
from infer_server.protos.buffers import uninitialised

_RECEIVE_BYTES = 256 << 10
_MIN_WAIT_SECS = 1e-3               # 0 would make the socket non-blocking


class BlockingChannel(ChannelBase):
    """Channel for calls from any thread."""

    def __init__(self, url: str, options: ChannelOptions) -> None:
        super().__init__(url, options)
        self._idle: dict[str, deque[BlockingConnection]] = defaultdict(deque)

    def call(self, path: str, message: Message, timeout: float | None = None, metadata: Metadata = ()
             ) -> bytes:
        """Return the serialised response. Raises StatusError."""
        attempts = self._attempts(path, timeout)
        secs = attempts.timeout
        while True:
            try:
                request = self._encoder.encode(path, message, secs, metadata, attempts.retries)
                answer = self._attempt(request, attempts)
                self._throttle.succeeded()
                return answer
            except StatusError as error:
                time.sleep(attempts.wait_after(error))
            secs = attempts.remaining()

    def close(self) -> None:
        self._is_closed = True
        for connections in self._idle.values():
            while connections:
                connections.pop().close()

    def _attempt(self, request: CallRequest, attempts: Attempts) -> bytes:
        address, connection = self._connection(attempts)
        try:
            return connection.call(request, self._options.max_message_bytes, attempts.deadline)
        finally:
            if connection.is_usable and not self._is_closed:
                self._idle[address.name].append(connection)
            else:
                connection.close()

    def _connection(self, attempts: Attempts) -> tuple[Address, BlockingConnection]:
        """Return a connection without a call. Raises StatusError if no address has a healthy server."""
        if self._is_closed:
            raise StatusError("CANCELLED", "the client is closed")
        if self._dns:
            self._follow_dns()
        reasons = []
        candidates = self._addresses.candidates(self._addresses.next(attempts.address))
        for number, address in enumerate(candidates, 1):
            attempts.address = address
            connection, remaining = self._idle_connection(address), attempts.remaining()
            secs = self._options.connect_secs if remaining is None else min(remaining, self._options.connect_secs)
            secs = connect_limit(secs, candidates[number:])
            try:
                if connection is None:
                    connection = BlockingConnection(address, self._keepalive, self._tls, self._tls_host,
                                                    self._config.health_service, secs)
                connection.check_health(self._encoder, min(secs, MAX_SECS))
            except (OSError, StatusError) as error:
                self._failed(address, connection is not None)
                if connection:
                    connection.close()
                attempts.remaining()
                reasons.append(f"{address.name}: {error}")
                continue
            address.succeeded()
            return address, connection
        raise StatusError("UNAVAILABLE", "; ".join(reasons))

    def _follow_dns(self) -> None:
        """Look the name up before the first call, and close connections to addresses that it has lost."""
        assert self._dns
        if not self._dns.addresses:
            self._dns.look_up()
        while self._dns.removed:
            idle = self._idle.pop(self._dns.removed.pop().name, deque())
            while idle:
                idle.pop().close()

    def _idle_connection(self, address: Address) -> BlockingConnection | None:
        idle = self._idle[address.name]
        while idle:
            connection = idle.pop()
            if connection.is_alive():
                return connection
            connection.close()
        return None


class BlockingConnection:
    """Connection for one call at a time."""

    def __init__(self, address: Address, keepalive: Keepalive, tls: ssl.SSLContext | None, tls_host: str | None,
                 health_service: str | None, secs: float) -> None:
        """Connect within `secs`; certificates are for `tls_host` or the address. Raises OSError, StatusError."""
        self._socket = _connect(address, tls, tls_host or address.host, secs)
        self._http2 = ClientConnection(keepalive)
        self._health = HealthCheck(health_service)
        self._buffer = uninitialised(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        try:
            deadline = time.monotonic() + secs
            self._send(deadline)
            while not self._http2.is_ready:
                self._receive(deadline)
                if not self._http2.takes_calls:
                    raise ConnectionError("the server ended the connection before it spoke HTTP/2")
        except BaseException:
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """True if another call may be made."""
        return self._http2.takes_calls and not self._http2.calls

    def is_alive(self) -> bool:
        """Return True unless the server has ended the connection since the last call."""
        try:
            self._socket.settimeout(0.0)
            while self._http2.takes_calls:
                self._take()
        except (BlockingIOError, ssl.SSLWantReadError):
            return True                             # no data has arrived, or only a part of a TLS record
        except OSError:
            return False
        return False

    def check_health(self, encoder: RequestEncoder, secs: float) -> None:
        """Raise StatusError if a health check is due and the server is not serving."""
        if self._health.is_due:
            try:
                require_healthy(self.call(self._health.request(encoder, secs), -1, time.monotonic() + secs))
            except StatusError as error:
                require_healthy(error)

    def call(self, request: CallRequest, max_message_bytes: int, deadline: float | None) -> bytes:
        """Return the serialised response. Raises StatusError."""
        call = PendingCall(max_message_bytes)
        self._http2.open(request, call)
        try:
            self._send(deadline)
            while not call.is_ended:
                self._receive(deadline)
                self._send(deadline)
        except StatusError as error:                # the deadline
            self._health.expire()
            self._http2.cancel(call)
            call.end(error)
            if self._http2.takes_calls:
                with suppress(StatusError, OSError):        # these mark the connection as lost
                    self._send(time.monotonic())
        except OSError as error:
            self._http2.lose(str(error))
        finally:
            if not call.is_ended:                   # e.g. by KeyboardInterrupt
                self._http2.lose("the call was interrupted")
        return call.result()

    def close(self) -> None:
        self._http2.go_away()
        with suppress(OSError):
            self._socket.settimeout(0.0)
            self._socket.send(self._http2.data_to_send())
        self._socket.close()

    def _send(self, deadline: float | None) -> None:
        while data := self._http2.data_to_send():
            self._limit(deadline)
            try:
                self._socket.sendall(data)
            except TimeoutError:                    # a part of the data is sent
                self._http2.lose("the server does not read")
                raise deadline_exceeded() from None

    def _receive(self, deadline: float | None) -> None:
        """Read from the socket and process the frames. Raises StatusError, OSError."""
        check = self._http2.check()
        self._send(deadline)
        if not (self._http2.takes_calls or self._http2.calls):      # the server did not answer a ping
            return
        self._limit(check if deadline is None else min(deadline, check))
        try:
            self._take()
        except TimeoutError:
            if deadline is not None and time.monotonic() >= deadline:
                raise deadline_exceeded() from None

    def _take(self) -> None:
        if count := self._socket.recv_into(self._buffer):
            self._http2.receive(self._view[:count])
        else:
            self._http2.lose("the server closed the connection")

    def _limit(self, moment: float | None) -> None:
        """Set the socket's timeout to end at `moment`; None and infinity mean no timeout."""
        if moment is not None and moment < math.inf:
            self._socket.settimeout(max(_MIN_WAIT_SECS, moment - time.monotonic()))
        elif self._socket.gettimeout() is not None:
            self._socket.settimeout(None)


def _connect(address: Address, tls: ssl.SSLContext | None, tls_host: str, secs: float) -> socket.socket:
    """Open a socket to the address, with TLS if `tls` is given. Raises OSError."""
    if not address.path:
        connected = socket.create_connection((address.host, address.port), timeout=secs)
    else:
        connected = socket.socket(socket.AF_UNIX)
    try:
        if address.path:
            connected.settimeout(secs)
            connected.connect(address.path)
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            connected = tls.wrap_socket(connected, server_hostname=tls_host)
            require_http2(connected.selected_alpn_protocol())
        return connected
    except BaseException:
        connected.close()
        raise
