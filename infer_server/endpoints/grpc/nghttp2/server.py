"""The gRPC port on libnghttp2 (`--grpc-front nghttp2`, the default)."""
from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any

from infer_server.endpoints.grpc.methods import Methods
from infer_server.endpoints.grpc.nghttp2.connection import GrpcConnection
from infer_server.endpoints.http2.connection import Shared
from infer_server.endpoints.http2.settings import ConnectionSettings
from infer_server.endpoints.inflight import Inflight
from infer_server.endpoints.tls import ServerTls

_BACKLOG = 1024                 # maximum number of connections that wait to be accepted
_CLOSING_SECS = 5.0             # time for clients to read pending responses when the port closes


class Nghttp2Server:
    """gRPC port on libnghttp2. Call listen() once, then close() once, on one event loop."""

    def __init__(self, methods: Methods, inflight: Inflight, settings: ConnectionSettings,
                 shares_port: bool = False) -> None:
        """Create the server without opening the port.

        Parameters
        ----------
        methods : Methods
            Calls that are served.
        inflight : Inflight
            Counts the bytes of messages.
        settings : ConnectionSettings
            Limits of a connection.
        shares_port : bool
            True if other processes of this server listen on the port.
        """
        self._shared = Shared(inflight, settings, asyncio.get_running_loop())
        self._methods, self._shares_port = methods, shares_port
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int, tls: ServerTls | None) -> int:
        """Open the port; returns its number, which is chosen if `port` is 0. Raises OSError."""
        options: dict[str, Any] = {"backlog": _BACKLOG, "ssl": tls.context(["h2"]) if tls else None}
        if ":" in host:                 # for :: asyncio would listen on IPv6 only
            options["sock"] = socket.create_server((host, port), family=socket.AF_INET6,
                                                   dualstack_ipv6=host == "::", reuse_port=self._shares_port)
        else:
            options |= {"host": host, "port": port, "reuse_port": self._shares_port or None}
        self._server = await self._shared.loop.create_server(
            partial(GrpcConnection, self._shared, self._methods), **options)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    @property
    def is_connected(self) -> bool:
        return bool(self._shared.connections)

    def stop_listening(self) -> None:
        """Refuse new connections, and have clients open others elsewhere; open calls are served."""
        if self._server:
            self._server.close()
        self._shared.drain()

    async def send_away(self) -> None:
        """Call stop_listening, and wait until clients send their next calls elsewhere."""
        self.stop_listening()
        await self._shared.drained()

    async def close(self) -> None:
        """End all connections when what was sent has reached the transport."""
        if self._server:
            self._server.close()
        connections = self._shared.connections
        for connection in list(connections):
            connection.close()
        end = self._shared.loop.time() + _CLOSING_SECS
        while connections and self._shared.loop.time() < end:
            await asyncio.sleep(0.01)
        for connection in list(connections):
            connection.abort()
