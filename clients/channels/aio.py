"""Channels on libnghttp2 over asyncio: one connection to each address, which all calls share."""
from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable
from typing import cast

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
_WRITE_BYTES = 256 << 10            # most bytes in the transport's write buffer
_TIMER_SECS = 1e-3                  # the resolution of an event loop's timers
_CLOSE_SECS = 1.0                   # time for a connection's orderly end, e.g. TLS's close_notify


class AioChannel(ChannelBase):
    """Channel for calls on one event loop."""

    def __init__(self, url: str, options: ChannelOptions) -> None:
        super().__init__(url, options)
        self._connections: dict[str, AioConnection] = {}            # connections that accept calls, by address
        self._open: set[AioConnection] = set()  # these, and connections that only finish their last calls
        self._connecting: dict[str, asyncio.Task[AioConnection]] = {}

    async def call(self, path: str, message: Message, timeout: float | None = None, metadata: Metadata = ()
                   ) -> bytes:
        """Return the serialised response. Raises StatusError."""
        attempts = self._attempts(path, timeout)
        secs = attempts.timeout
        while True:
            try:
                request = self._encoder.encode(path, message, secs, metadata, attempts.retries)
                if self._dns:
                    await self._follow_dns(attempts)
                address = attempts.address = self._addresses.next(attempts.address)
                connection = self._ready(address) or await self._connect_any(address, attempts)
                answer = await connection.call(request, self._options.max_message_bytes, attempts.deadline)
                self._throttle.succeeded()
                return answer
            except StatusError as error:
                await asyncio.sleep(attempts.wait_after(error))
            secs = attempts.remaining()

    def prepare(self, path: str, message: Message) -> Callable[[float, Callable[[PendingCall], object]], bool]:
        """Return a function that makes a call without a coroutine and without retries: start(timeout, done).

        It returns False if no connection is ready; `call` opens one. `done` is called when the call has ended.
        """
        encoded = functools.lru_cache(maxsize=4)(functools.partial(self._encoder.encode, path, message))

        def start(timeout: float, done: Callable[[PendingCall], object]) -> bool:
            connection = self._ready(self._addresses.next(None))
            if connection is None:
                return False
            try:
                connection.start(encoded(timeout), PendingCall(self._options.max_message_bytes, done),
                                 time.monotonic() + timeout)
            except StatusError:
                return False
            return True

        return start

    async def close(self) -> None:
        self._is_closed = True
        connecting = list(self._connecting.values())
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, *(connection.close() for connection in self._open), return_exceptions=True)

    def _ready(self, address: Address) -> AioConnection | None:
        """Return the connection to an address if it accepts calls without waiting."""
        connection = self._connections.get(address.name)
        return connection if connection and connection.takes_calls and not connection.health.is_due else None

    async def _connect_any(self, first: Address, attempts: Attempts) -> AioConnection:
        """Return a connection to a healthy server, from `first` on. Raises StatusError if there is none."""
        if self._is_closed:
            raise StatusError("CANCELLED", "the client is closed")
        reasons = []
        candidates = self._addresses.candidates(first)
        for number, address in enumerate(candidates, 1):
            try:
                attempts.address = address
                if connection := self._ready(address):
                    return connection
                async with asyncio.timeout(attempts.remaining()):
                    return await asyncio.shield(self._connect(address, connect_limit(
                        self._options.connect_secs, candidates[number:])))
            except TimeoutError:
                raise deadline_exceeded() from None
            except (OSError, StatusError) as error:
                reasons.append(f"{address.name}: {error}")
        raise StatusError("UNAVAILABLE", "; ".join(reasons))

    async def _follow_dns(self, attempts: Attempts) -> None:
        """Look the name up before the first call, and drain connections to addresses that it has lost."""
        assert self._dns
        if not self._dns.addresses:
            try:
                async with asyncio.timeout(attempts.remaining()):
                    await asyncio.to_thread(self._dns.look_up)
            except TimeoutError:
                raise deadline_exceeded() from None
        while self._dns.removed:
            if connection := self._connections.pop(self._dns.removed.pop().name, None):
                connection.drain()

    def _connect(self, address: Address, secs: float) -> asyncio.Task[AioConnection]:
        """Start to connect, or to check the health of an existing connection, unless another call already has."""
        name = address.name
        task = self._connecting.get(name)
        if task is None:
            task = self._connecting[name] = asyncio.get_running_loop().create_task(self._healthy(address, secs))
            task.add_done_callback(lambda ended: (self._connecting.pop(name), ended.exception()))
        return task

    async def _healthy(self, address: Address, secs: float) -> AioConnection:
        """Return a connection to a server that is serving, within `secs`. Raises OSError, StatusError."""
        connection, is_connected = self._connections.get(address.name), False
        try:
            if connection is None or not connection.takes_calls:
                async with asyncio.timeout(secs):
                    connection = await self._new_connection(address)
            is_connected = True
            if connection.health.is_due:
                await connection.check_health(self._encoder, min(secs, MAX_SECS))
        except TimeoutError:
            self._failed(address, is_connected)
            raise StatusError("UNAVAILABLE", f"no connection within {secs:g} s") from None
        except asyncio.CancelledError:
            raise StatusError("CANCELLED", "the client is closed") from None
        except (OSError, StatusError):
            self._failed(address, is_connected)
            if connection:
                connection.drain()
            raise
        address.succeeded()
        self._connections[address.name] = connection
        return connection

    async def _new_connection(self, address: Address) -> AioConnection:
        """Return a connection to a server that speaks HTTP/2. Raises OSError."""
        loop = asyncio.get_running_loop()
        protocol = functools.partial(AioConnection, self._keepalive, self._config.health_service)
        tls, host = self._tls, (self._tls_host or address.host) if self._tls else None
        transport, connection = await (
            loop.create_unix_connection(protocol, address.path, ssl=tls, server_hostname=host) if address.path else
            loop.create_connection(protocol, address.host, address.port, ssl=tls, server_hostname=host))
        self._open.add(connection)              # only now: connection_lost() is not called after a failed TLS handshake
        connection.ended.add_done_callback(lambda _: self._open.discard(connection))
        try:
            if tls:
                require_http2(transport.get_extra_info("ssl_object").selected_alpn_protocol())
            await connection.ready()
        except BaseException:
            transport.abort()
            raise
        return connection


class AioConnection(asyncio.BufferedProtocol):
    """Connection for any number of calls."""

    def __init__(self, keepalive: Keepalive, health_service: str | None) -> None:
        self.health = HealthCheck(health_service)
        self._loop = asyncio.get_running_loop()
        self._keepalive = keepalive
        self._http2 = ClientConnection(keepalive)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(uninitialised(_RECEIVE_BYTES))
        self._is_writable = True                    # in the transport
        self._flushing = False                      # a flush is scheduled
        self._has_started = False                   # calls were started since the last flush
        self._check: asyncio.TimerHandle | None = None
        self._check_at = math.inf

    @property
    def takes_calls(self) -> bool:
        """True if another call may be made."""
        return self._http2.takes_calls

    async def call(self, request: CallRequest, max_message_bytes: int, deadline: float | None) -> bytes:
        """Return the serialised response. Raises StatusError."""
        ended = self._loop.create_future()
        call = PendingCall(max_message_bytes, functools.partial(_set_done, ended))
        self.start(request, call, deadline)
        try:
            await ended
        except asyncio.CancelledError:
            self._http2.cancel(call)
            self._flush_soon()
            raise
        if time.monotonic() >= call.deadline:       # perhaps not answered
            self.health.expire()
        return call.result()

    def start(self, request: CallRequest, call: PendingCall, deadline: float | None) -> None:
        """Begin a call. Raises StatusError if the connection accepts no more calls."""
        self._http2.open(request, call)
        self._has_started = True
        self._flush_soon()
        if deadline is not None:
            call.deadline = deadline
        if call.deadline < self._check_at or self._check_at == math.inf:    # else a scheduled check is early enough
            self._check_before(min(call.deadline, time.monotonic() + self._keepalive.secs))

    async def check_health(self, encoder: RequestEncoder, secs: float) -> None:
        """Raise StatusError if the server does not serve."""
        try:
            require_healthy(await self.call(self.health.request(encoder, secs), -1, time.monotonic() + secs))
        except StatusError as error:
            require_healthy(error)

    async def ready(self) -> None:
        """Wait until the connection is established at the HTTP/2 level. Raises OSError."""
        await self._ready

    def drain(self) -> None:
        """Take no more calls, and close when the open ones have ended."""
        self._http2.takes_calls = False
        self._flush_soon()

    async def close(self) -> None:
        """End the connection, and all calls on it."""
        self._http2.lose("the client is closed")
        self._http2.go_away()
        self.flush()                                # this closes the transport, since HTTP/2 has ended
        await asyncio.wait([self.ended], timeout=_CLOSE_SECS)
        if self._transport:
            self._transport.abort()

    # ---- the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BYTES)
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        http2, self._flushing = self._http2, True
        http2.receive(self._buffer[:nbytes])
        self._flushing = False
        if http2.is_ready and not self._ready.done():
            self._ready.set_result(None)
        if self._has_started:                       # by calls that have ended
            self.flush()
        else:                                       # tasks that await ended calls may start others
            self._flush_soon()

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self.flush()

    def connection_lost(self, reason: Exception | None) -> None:
        self._transport = None
        if self._check:
            self._check.cancel()
        text = str(reason) if reason else "the server closed the connection"
        self._http2.lose(text)
        if not self._ready.done():
            self._ready.set_exception(ConnectionError(text))
        self.ended.set_result(None)

    # ---- sending
    def _flush_soon(self) -> None:
        """Flush at the end of this iteration of the event loop."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send as much as the flow-control windows and the transport's buffer allow."""
        self._flushing = self._has_started = False
        http2, transport = self._http2, self._transport
        if transport is None:
            return
        while self._is_writable and (data := http2.data_to_send()):
            transport.write(data)
        if not http2.takes_calls and not http2.calls:
            transport.close()

    def _check_before(self, moment: float) -> None:
        """Schedule the check of deadlines and keepalive for `moment` or earlier; one timer serves all calls."""
        if moment < self._check_at:
            if self._check:
                self._check.cancel()
            self._check_at = moment
            self._check = self._loop.call_later(max(_TIMER_SECS, moment - time.monotonic()), self._check_now)

    def _check_now(self) -> None:
        self._check_at = math.inf
        self._check_before(self._http2.check())
        self._flush_soon()


def _set_done(ended: asyncio.Future[None], _: PendingCall) -> None:
    if not ended.done():                            # the waiting task may have been cancelled
        ended.set_result(None)

