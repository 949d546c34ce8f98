"""HTTP server of one port: HTTP/1.1, and HTTP/2 if ngh2 is installed."""
from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import cast

from infer_server.endpoints.http.connection import HttpConnection
from infer_server.endpoints.http.exchange import Handler
from infer_server.endpoints.http.reading import PortLimits
from infer_server.endpoints.tls import ServerTls
from infer_server.protos import http2

if http2.is_installed:
    from infer_server.endpoints.http.http2 import Http2Requests, settings_of
    from infer_server.endpoints.http2.connection import Shared

_BACKLOG = 1024                 # maximum number of connections that wait to be accepted
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def listen(host: str, port: int, handle: Handler, limits: PortLimits, tls: ServerTls | None = None,
                 shares_port: bool = False) -> HttpServer:
    """Serve HTTP on a port.

    shares_port: other processes listen on it, too (SO_REUSEPORT). Raises OSError if the port is in use or the
    certificates cannot be read.
    """
    context = tls.context(["h2", "http/1.1"] if http2.is_installed else ["http/1.1"]) if tls else None
    closing_secs = limits.inflight.send_timeout_secs if tls else None   # the client may still be reading a response
    connections = set[HttpConnection]()
    loop = asyncio.get_running_loop()
    shared = Shared(limits.inflight, settings_of(limits), loop) if http2.is_installed else None

    def connect() -> asyncio.BaseProtocol:
        http1 = HttpConnection(handle, limits, connections)
        return FirstBytes(http1, lambda: Http2Requests(shared, handle, limits)) if shared else http1

    if ":" in host:                     # for :: asyncio would listen on IPv6 only, gRPC on both
        ipv6 = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=host == "::",
                                    reuse_port=shares_port)
        server = await loop.create_server(connect, sock=ipv6, backlog=_BACKLOG, ssl=context,
                                          ssl_shutdown_timeout=closing_secs)
    else:
        server = await loop.create_server(connect, host, port, backlog=_BACKLOG, ssl=context,
                                          ssl_shutdown_timeout=closing_secs, reuse_port=shares_port or None)
    return HttpServer(server, connections, shared)


class FirstBytes(asyncio.Protocol):
    """Protocol that detects the HTTP version of a client by ALPN or its first bytes."""

    def __init__(self, http1: HttpConnection, make_http2: Callable[[], Http2Requests]) -> None:
        """Take the HTTP/1.1 connection, whose timeout also limits the detection, and a factory for HTTP/2."""
        self._http1, self._make_http2 = http1, make_http2
        self._begun = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)          # uvloop's class does not derive from it
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        self._http1.connection_made(transport)
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            self._speak_http2()

    def data_received(self, data: bytes) -> None:
        data = self._begun + data
        if data.startswith(_PREFACE):
            self._speak_http2().receive(data)
        elif _PREFACE.startswith(data):
            self._begun = data
        else:
            self._transport.set_protocol(self._http1)
            self._http1.data_received(data)

    def _speak_http2(self) -> Http2Requests:
        self._http1.connection_lost(None)           # releases its transport and timer
        connection = self._make_http2()
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        return connection

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, reason: Exception | None) -> None:
        self._http1.connection_lost(reason)


class HttpServer:
    """Listening port and its connections."""

    def __init__(self, server: asyncio.Server, connections: set[HttpConnection], shared: Shared | None) -> None:
        """Take the open connections over HTTP/1.1, and those over HTTP/2 (`shared`; None if it is not served)."""
        self._server, self._connections, self._shared = server, connections, shared

    @property
    def port(self) -> int:
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    @property
    def is_connected(self) -> bool:
        return bool(self._connections) or self._shared is not None and bool(self._shared.connections)

    async def send_away(self) -> None:
        """Send GOAWAY to HTTP/2 clients, so that they reconnect, and wait until it is delivered."""
        if shared := self._shared:
            shared.drain()
            await shared.drained()

    def close(self) -> None:
        """Stop listening, and close the connections when their responses have been sent."""
        self._server.close()
        for connection in [*self._connections, *(self._shared.connections if self._shared else ())]:
            connection.close()
