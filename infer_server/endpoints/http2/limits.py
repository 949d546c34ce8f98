"""Timeouts of an HTTP/2 connection: keepalive, age, pings, slow messages, unread responses."""
from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping
from typing import Protocol

from infer_server.endpoints.http2.settings import ConnectionSettings
from infer_server.endpoints.http2.streams import RequestHandler
from infer_server.endpoints.inflight import Inflight
from infer_server.errors import SlowMessageError

_HANDSHAKE_SECS = 20.0              # time for a client to send its SETTINGS
_IDLE_PING_SECS = 7200.0            # minimum interval of a client's pings while no call is open


class Limited(Protocol):
    """Interface of the connection: Http2Connection."""
    loop: asyncio.AbstractEventLoop
    inflight: Inflight
    peer: str

    @property
    def streams(self) -> Mapping[int, RequestHandler]:
        """Open streams by number."""

    def ping(self) -> None: ...

    def end_for_pings(self) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class ConnectionTimers:
    """Timers of a connection; stop() cancels them."""

    def __init__(self, connection: Limited, settings: ConnectionSettings) -> None:
        self._connection, self._settings = connection, settings
        self._loop = connection.loop
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._last_ping = -math.inf                 # time of the client's last ping
        self._strikes = 0
        self._last_received = 0.0
        self._pings = 0                             # our pings since data were last sent
        self._partial: dict[int, int] = {}          # bytes of partial messages at the last check, by stream

    def start(self) -> None:
        settings = self._settings
        self.received()
        self.later("handshake", _HANDSHAKE_SECS, self._connection.abort)
        if settings.max_age_secs < math.inf:
            self.later("age", settings.max_age_secs * random.uniform(0.9, 1.1), self._grow_old)
        if settings.idle_secs < math.inf:
            self.later("idle", settings.idle_secs, self._end_idle)
        if settings.keepalive_secs < math.inf:
            self.later("keepalive", settings.keepalive_secs, self._keep_alive)

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def later(self, name: str, secs: float, callback: Callable[[], None]) -> None:
        """Call `callback` in `secs` seconds unless the connection ends before."""
        self._timers[name] = self._loop.call_later(secs, callback)

    def _cancel(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    # ---- events of the connection
    def received(self) -> None:
        """Note that bytes have arrived."""
        self._last_received = self._loop.time()

    def sent(self) -> None:
        """Note that data were sent, which permits pings again."""
        self._strikes, self._last_ping, self._pings = 0, -math.inf, 0

    def on_settings(self) -> None:
        self._cancel("handshake")

    def on_pong(self) -> None:
        self._pings = 0
        self._cancel("ping")

    def on_ping(self) -> None:
        now, settings = self._loop.time(), self._settings
        allowed = self._connection.streams or settings.keepalive_without_calls
        if now - self._last_ping < (settings.min_ping_interval_secs if allowed else _IDLE_PING_SECS):
            self._strikes += 1
            if 0 < settings.max_ping_strikes == self._strikes - 1:
                self._connection.end_for_pings()
        self._last_ping = now

    def _keep_alive(self) -> None:
        settings = self._settings
        silence = self._loop.time() - self._last_received
        if silence >= settings.keepalive_secs and (self._connection.streams or settings.keepalive_without_calls) and (
                settings.max_pings_without_data == 0 or self._pings < settings.max_pings_without_data):
            self._pings += 1
            self._connection.ping()
            if "ping" not in self._timers:
                self.later("ping", settings.keepalive_timeout_secs, self._connection.abort)
            silence = 0.0
        self.later("keepalive", settings.keepalive_secs - min(silence, settings.keepalive_secs * 0.9),
                    self._keep_alive)

    def _end_idle(self) -> None:
        """Close the connection if it has been idle for `idle_secs`."""
        idle_secs = self._settings.idle_secs
        silence = 0.0 if self._connection.streams else self._loop.time() - self._last_received
        if silence >= idle_secs:
            self._connection.close()
        else:
            self.later("idle", idle_secs - silence, self._end_idle)

    def _grow_old(self) -> None:
        self._connection.drain()
        if self._settings.max_age_grace_secs < math.inf:
            self.later("grace", self._settings.max_age_grace_secs, self._connection.close)

    def watch_unread(self) -> None:
        """Start the send timeout unless it runs; to be called while responses wait to be read."""
        if "unread" not in self._timers:
            self.later("unread", self._connection.inflight.send_timeout_secs, self._check_unread)

    def _check_unread(self) -> None:
        """Abort the connection if its client has not read a response in time."""
        del self._timers["unread"]
        timeout = self._connection.inflight.send_timeout_secs
        answered = [call.answered_at for call in self._connection.streams.values() if call.answered_at]
        if answered and (waited := self._loop.time() - min(answered)) >= timeout:
            self._connection.inflight.warn_of(self._connection.peer)
            self._connection.abort()
        elif answered:
            self.later("unread", timeout - waited, self._check_unread)

    def watch_partial(self) -> None:
        """Start checking the minimum rate unless it runs; to be called while a message arrives in pieces."""
        if "partial" not in self._timers and self._settings.min_body_rate:
            self._partial = {}
            self.later("partial", self._settings.body_grace_secs, self._check_partial)

    def _check_partial(self) -> None:
        """End the calls whose messages arrive too slowly."""
        del self._timers["partial"]
        least = self._settings.min_body_rate * self._settings.body_grace_secs
        before, self._partial = self._partial, {}
        for stream, call in list(self._connection.streams.items()):
            if not call.is_partial:
                continue
            if stream in before and call.partial_bytes - before[stream] < least:
                call.fail(SlowMessageError(
                    f"the message arrives at less than {self._settings.min_body_rate} bytes a second, on average over "
                    f"{self._settings.body_grace_secs:g} s (--min-body-rate, --body-grace-secs)"))
            else:
                self._partial[stream] = call.partial_bytes
        if self._partial:
            self.later("partial", self._settings.body_grace_secs, self._check_partial)
