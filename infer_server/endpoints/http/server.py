"""Opens an HTTP port."""
from __future__ import annotations

import asyncio
import socket

from infer_server.endpoints.http.connection import HttpConnection
from infer_server.endpoints.http.exchange import Handler
from infer_server.endpoints.http.reading import Limits
from infer_server.endpoints.tls import Tls

_BACKLOG = 1024                 # connections that were not accepted yet


async def listen(host: str, port: int, handle: Handler, limits: Limits, tls: Tls | None = None,
                 shares_port: bool = False) -> HttpServer:
    """Serves HTTP/1.1 on a port. shares_port: with other processes. Raises OSError if it is taken, or if the
    certificates are none."""
    context = tls.context() if tls else None
    closing_secs = limits.inflight.send_timeout_secs if tls else None   # an answer may be before the end, unread
    connections = set[HttpConnection]()

    def connect() -> HttpConnection:
        return HttpConnection(handle, limits, connections)

    loop = asyncio.get_running_loop()
    if ":" in host:                     # asyncio itself would take :: for IPv6 alone; gRPC takes it for both
        ipv6 = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=host == "::",
                                    reuse_port=shares_port)
        return HttpServer(await loop.create_server(connect, sock=ipv6, backlog=_BACKLOG, ssl=context,
                                                   ssl_shutdown_timeout=closing_secs), connections)
    return HttpServer(await loop.create_server(connect, host, port, backlog=_BACKLOG, ssl=context,
                                               ssl_shutdown_timeout=closing_secs, reuse_port=shares_port or None),
                      connections)


class HttpServer:
    """A listening port and its connections."""

    def __init__(self, server: asyncio.Server, connections: set[HttpConnection]) -> None:
        self._server, self._connections = server, connections

    @property
    def port(self) -> int:
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    @property
    def is_connected(self) -> bool:
        return bool(self._connections)

    def close(self) -> None:
        """Listens no more, and ends the connections once what was answered on them is sent."""
        self._server.close()
        for connection in list(self._connections):
            connection.close()
