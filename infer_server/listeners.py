"""Ports of a process: opened, and closed so that no response is lost."""
from __future__ import annotations

import asyncio
import os
import time
from typing import Protocol

from infer_server.endpoints.http.exchange import Handler
from infer_server.endpoints.http.reading import PortLimits
from infer_server.endpoints.http.server import HttpServer, listen
from infer_server.endpoints.tls import ServerTls

_POLL_SECS = 0.05               # interval of checks for open connections, each of which visits all descriptors
_ACCEPT_ITERATIONS = 5          # iterations of the loop to take connections that the system has accepted
_REFUSING_SECS = 0.25           # time in which clients that send another request get a refusal
SENDING_SECS = 5.0              # time for computed responses to reach their clients


def address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    """Return the error for a port that cannot be opened."""
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
    return OSError(f"cannot listen on {address(host, port)}: {reason}")


class GrpcServer(Protocol):
    """Interface of a gRPC port: GrpcioServer or Nghttp2Server."""

    async def listen(self, host: str, port: int, tls: ServerTls | None) -> int:
        """Open the port and return its number. Raises OSError."""

    @property
    def is_connected(self) -> bool:
        """True while a client is connected."""

    def stop_listening(self) -> None:
        """Refuse new connections; open ones are still served."""

    async def send_away(self) -> None:
        """Have clients send their next calls to other servers, where the library can (GOAWAY)."""

    async def close(self) -> None:
        """End all connections."""


class Listeners:
    """Ports of one event loop. Open ports, then call close() once."""

    def __init__(self, limits: PortLimits, shares_ports: bool = False) -> None:
        """Apply `limits` to the ports; `shares_ports` is True if other processes of this server listen on them, too."""
        self._limits, self._shares_ports = limits, shares_ports
        self._grpc: GrpcServer | None = None
        self._http: list[HttpServer] = []

    async def listen_http(self, host: str, port: int, handle: Handler, tls: ServerTls | None = None) -> int:
        """Open an HTTP port and return its number. Raises OSError."""
        try:
            server = await listen(host, port, handle, self._limits, tls, self._shares_ports)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        self._http.append(server)
        return server.port

    async def listen_grpc(self, server: GrpcServer, host: str, port: int, tls: ServerTls | None) -> int:
        """Open the port of a gRPC server and return its number. Raises OSError."""
        self._grpc = server
        try:
            return await server.listen(host, port, tls)
        except OSError as error:
            raise cannot_listen(host, port, error) from error

    async def send_away(self) -> None:
        """Have clients over HTTP/2 send their next requests to other servers. To be called before these are refused."""
        await asyncio.gather(*(server.send_away() for server in (self._grpc, *self._http) if server))

    async def close(self, answered: bool) -> None:
        """Refuse new connections, wait until responses are sent, and end the connections.

        Call this once new requests are refused. `answered` is True if all accepted requests have been answered.
        """
        # Calls that arrive over gRPC meanwhile are refused with a status that makes clients try another server.
        if self._grpc:
            self._grpc.stop_listening()
        await self._refuse()
        if answered:
            await self._limits.inflight.wait_sent(SENDING_SECS)
        if self._grpc:
            await self._grpc.close()
        for http in self._http:
            http.close()

    async def _refuse(self) -> None:
        """Refuse requests that clients send immediately after a response, while any client is connected."""
        for _ in range(_ACCEPT_ITERATIONS):
            await asyncio.sleep(0)
        end = time.monotonic() + _REFUSING_SECS
        while time.monotonic() < end and (any(http.is_connected for http in self._http)
                                          or self._grpc and self._grpc.is_connected):
            await asyncio.sleep(_POLL_SECS)
