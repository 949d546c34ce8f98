"""HTTP/2 connection of a client: libnghttp2 over an asyncio transport.

Responses of one iteration of the event loop are written together. Unsent data stay in libnghttp2, are sent as the
client's flow-control windows permit, and are counted until their stream has ended; the transport's buffer is bounded.
"""
from __future__ import annotations

import asyncio
import logging
import ssl
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from infer_server.batching.event_loop import Reads
from infer_server.endpoints.http2.limits import ConnectionTimers
from infer_server.endpoints.http2.settings import ConnectionSettings
from infer_server.endpoints.http2.streams import CountedStream, PartsWriter, RequestHandler
from infer_server.endpoints.inflight import Inflight
from infer_server.protos.http2 import (
    ConnectionClosed,
    DataReceived,
    ErrorCode,
    Header,
    NGH2Error,
    PingAcknowledged,
    PingReceived,
    RequestReceived,
    SettingsReceived,
    StreamClosed,
    StreamProtocolError,
    TrailersReceived,
    server_connection,
)
from infer_server.workers import wait_until

log = logging.getLogger(__name__)

_WINDOW_BYTES = 4 << 20             # flow-control window of a stream; received bytes reopen it at once
_RECEIVE_BYTES = 256 << 10          # maximum bytes read from a socket at a time
WRITE_BYTES = 256 << 10            # maximum bytes passed to the transport at a time, and of its buffer
_GOAWAY_SECS = 1.0                  # time for a client to acknowledge the shutdown notice
_LINGER_SECS = 1.0                  # time for a client to close a connection that has ended
_LEAVING_SECS = 2.0                 # time for all clients to acknowledge
_NOTICE = b"shutdown"               # data of the PING that follows the shutdown notice


@dataclass
class Shared:
    """State that the connections of a port share."""
    inflight: Inflight
    settings: ConnectionSettings
    loop: asyncio.AbstractEventLoop
    connections: set[Http2Connection] = field(default_factory=set)
    is_draining: bool = False           # new connections are closed at once
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    # One buffer serves all connections, because received bytes are consumed before the next read.
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_RECEIVE_BYTES)))

    def drain(self) -> None:
        """Send GOAWAY to all clients, so that they send their next requests to other servers."""
        self.is_draining = True
        for connection in list(self.connections):
            connection.drain()

    async def drained(self) -> None:
        """Wait until all clients have been sent the final GOAWAY, at most _LEAVING_SECS."""
        await wait_until(lambda: all(connection.has_gone_away for connection in self.connections), _LEAVING_SECS)


class Sending:
    """Context manager for sends that may fail because the stream was reset or the connection is ending."""

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, NGH2Error):
            self._connection.failed(error)
        return error is None or isinstance(error, NGH2Error)


class Http2Connection(asyncio.BufferedProtocol):
    """HTTP/2 connection, whose streams a subclass serves. Not thread-safe: belongs to the event loop."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._settings = settings = shared.settings
        self.loop, self.inflight = shared.loop, shared.inflight
        self._reads = Reads.of(shared.loop)
        self.peer = ""
        self._http2 = http2 = server_connection(settings.max_streams, _WINDOW_BYTES)
        self._receive_data, self._events = http2.receive_data, http2.events
        self._transport: asyncio.Transport | None = None
        self.streams: dict[int, RequestHandler] = {}           # open streams by number
        self._flushing = False                                  # a flush is scheduled
        self._paused = False                                    # the transport's buffer is full
        self._resets: list[int] = []                            # streams to reset when their trailers are sent
        self._uncounted: list[CountedStream] = []               # streams that received bytes in this iteration
        self._writers: dict[int, PartsWriter] = {}              # streams that wait until their data are sent
        self._limits = ConnectionTimers(self, settings)
        self._draining = False
        self.has_gone_away = False                              # the final GOAWAY has been sent
        self._lingers = False                                   # received bytes are discarded

    # ---- the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        self.peer = self.peer_of(transport.get_extra_info("peername"))
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            log.info("%s speaks no HTTP/2 over TLS (ALPN): its connection is closed", self.peer)
            transport.close()
            return
        self._shared.connections.add(self)
        self._limits.start()
        if self._shared.is_draining:
            self.has_gone_away = True
            self.close()                        # sends GOAWAY: no request was processed
        else:
            self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.receive(self._shared.buffer[:nbytes])

    def receive(self, data: bytes | memoryview) -> None:
        """Take bytes that have arrived."""
        if self._lingers:
            return
        self._limits.received()
        self._flushing = True               # this function flushes at its end
        self._reads.begin()
        try:
            self._receive_data(data)
            self._handle_events()
        except NGH2Error as error:
            self.failed(error)
        finally:
            self._reads.end()
            self.flush()

    def eof_received(self) -> bool:
        return False                        # closes the transport

    def connection_lost(self, reason: Exception | None) -> None:
        self._transport = None
        self._shared.connections.discard(self)
        self._limits.stop()
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.close()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.flush()

    @abstractmethod
    def peer_of(self, name: Any) -> str:
        """Return the address of a client for the log. name: as getpeername() returns it."""

    # ---- events
    def _handle_events(self) -> None:
        streams = self.streams
        for event in self._events():
            if isinstance(event, DataReceived):
                if stream := streams.get(event.stream_id):
                    stream.receive(event.data, event.end_stream)
                else:
                    self.acknowledge(event.stream_id, len(event.data))
            elif isinstance(event, RequestReceived):
                self.begin(event.stream_id, event.headers, event.end_stream)
            elif isinstance(event, StreamClosed):
                self._writers.pop(event.stream_id, None)
                if stream := streams.pop(event.stream_id, None):
                    stream.close()
            elif isinstance(event, TrailersReceived):
                if stream := streams.get(event.stream_id):
                    stream.receive(b"", True)
            elif isinstance(event, PingReceived):
                self._limits.on_ping()
            elif isinstance(event, PingAcknowledged):
                self._limits.on_pong()
                if event.opaque_data == _NOTICE:
                    self._go_away()
            elif isinstance(event, SettingsReceived):
                self._limits.on_settings()
            elif isinstance(event, ConnectionClosed):
                self.flush_soon()           # flushing then closes the transport
        if self._uncounted:
            uncounted, self._uncounted = self._uncounted, []
            for partial in uncounted:
                partial.count()

    @abstractmethod
    def begin(self, stream: int, headers: tuple[Header, ...], ended: bool) -> None:
        """Take a new stream. ended: its client has sent all of it."""

    # ---- streams
    def count_soon(self, stream: CountedStream) -> None:
        """Have `stream.count` called when the events of this iteration have been handled."""
        self._uncounted.append(stream)

    def acknowledge(self, stream: int, size: int) -> None:
        if size:
            try:
                self._http2.acknowledge_received_data(size, stream)
            except NGH2Error as error:
                self.failed(error)

    def write(self, stream: int, data: bytes, writer: PartsWriter) -> bool:
        """Send a part of an answer. False: it is queued, and `writer.sent` will be called when it has been sent."""
        with Sending(self):
            self._http2.send_data(stream, data)
        self._limits.sent()
        self.flush()
        if self._transport is None or self._http2.queued_body_size(stream) == 0:
            return True
        self._writers[stream] = writer
        return False

    def answer_with(self, stream: int, headers: Sequence[Header], ended: bool) -> None:
        """Send an answer that consists of headers. ended: the client has sent all of its request."""
        if self._transport:
            with Sending(self):
                self._http2.send_response(stream, headers, end_stream=True)
                if not ended:
                    self.reset_when_sent(stream)
            self.sending()

    def failed(self, error: NGH2Error) -> None:
        """Take note that something cannot be sent: a stream has been reset, or the connection is ending."""
        if isinstance(error, StreamProtocolError):
            log.debug("%s: %s", self.peer, error)       # an event reports the reset
        else:
            log.info("%s: %s: its connection is closed", self.peer, error)
            self.abort()

    def reset_when_sent(self, stream: int) -> None:
        self._resets.append(stream)

    def watch_partial(self) -> None:
        self._limits.watch_partial()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._shared.tasks.add(task)            # the loop itself keeps none alive
        task.add_done_callback(self._shared.tasks.discard)
        return task

    def sending(self) -> None:
        self._limits.sent()
        if not self._flushing:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Send at the end of this iteration of the event loop."""
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send as much as the flow-control windows and the transport accept."""
        self._flushing = False
        transport, http2 = self._transport, self._http2
        if transport is None:
            return
        try:
            waiting = http2.queued_body_size() if self._writers else 0
            while not self._paused and (data := http2.data_to_send(WRITE_BYTES)):
                transport.write(data)
            if not self._paused and self._resets:
                self._reset_sent()
            self._handle_events()
        except NGH2Error as error:
            self.failed(error)
            return
        if self._writers and http2.queued_body_size() < waiting:
            self._wake_writers()
        if self.streams and (self._paused or http2.queued_body_size()):
            self._limits.watch_unread()
        if not (http2.want_read or http2.want_write) and not self._paused:
            self._end()

    def _end(self) -> None:
        """Close the transport, after a GOAWAY only once the client closed or _LINGER_SECS have passed.

        Closing earlier would reset the connection on the client's next bytes, and lose the last answers.
        """
        transport = self._transport
        if transport and self.has_gone_away and transport.can_write_eof():
            if not self._lingers:
                self._lingers = True
                transport.write_eof()
                self._limits.stop()
                self._limits.later("linger", _LINGER_SECS, self.abort)
        elif transport:
            transport.close()

    def _reset_sent(self) -> None:
        http2, waiting = self._http2, []
        for stream in self._resets:
            if http2.queued_body_size(stream):
                waiting.append(stream)
            else:
                http2.reset_stream(stream, ErrorCode.NO_ERROR)
        self._resets = waiting
        if self._transport and (data := http2.data_to_send(WRITE_BYTES)):
            self._transport.write(data)

    def _wake_writers(self) -> None:
        for stream, writer in list(self._writers.items()):
            if self._http2.queued_body_size(stream) == 0:
                del self._writers[stream]
                writer.sent()

    def drain(self) -> None:
        """Have the client open its next calls on another connection.

        Calls are served until the client has acknowledged the notice; what it sends after that is not read, so that the
        client knows that it may be repeated elsewhere.
        """
        if self._transport and not self._draining:
            self._draining = True
            with Sending(self):
                self._http2.send_shutdown_notice()
                self._http2.ping(_NOTICE)
            self.flush()
            self._limits.later("goaway", _GOAWAY_SECS, self._go_away)

    def _go_away(self) -> None:
        if self._transport and not self.has_gone_away:
            self.has_gone_away = True
            with Sending(self):
                self._http2.send_goaway()
            self.flush()

    def close(self) -> None:
        """Close the connection, which ends all its calls, when the transport's buffer has been sent."""
        if self._transport:
            with suppress(NGH2Error):           # the session is already terminating
                self._http2.terminate_connection()
            self.flush()
            self._close_transport()

    def _close_transport(self) -> None:
        if self._transport:
            self._transport.close()

    def ping(self) -> None:
        """Send a PING."""
        with Sending(self):
            self._http2.ping()
        self.flush()

    def end_for_pings(self) -> None:
        """Close the connection of a client that pings too often."""
        log.info("%s pings too often: its connection is closed", self.peer)
        with Sending(self):
            self._http2.send_goaway(ErrorCode.ENHANCE_YOUR_CALM, debug_data=b"too_many_pings")
        self.flush_soon()
        self._limits.later("strikes", 0.0, self._close_transport)

    def abort(self) -> None:
        """Abort the connection at once."""
        if self._transport:
            self._transport.abort()
