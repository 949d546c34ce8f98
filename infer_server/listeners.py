"""The ports of a process that clients connect to: opened, and closed so that nobody loses an answer."""
from __future__ import annotations

import asyncio
import os
import time
from typing import Protocol

from infer_server.endpoints.http.exchange import Handler
from infer_server.endpoints.http.reading import Limits
from infer_server.endpoints.http.server import HttpServer, listen
from infer_server.endpoints.tls import Tls

_LOOKING_SECS = 0.05            # between two looks whether anybody is left: each at all of the process's descriptors
_TAKING_IN_TURNS = 5            # of the loop, for it to take in connections that the system has accepted
_REFUSING_SECS = 0.25           # for clients that ask again at once to be told, before their connection closes
SENDING_SECS = 5.0              # for computed answers to reach their clients


def address(host: str, port: int) -> str:
    """host:port, the host in brackets if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    """Return the error of a port that cannot be opened."""
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
    return OSError(f"cannot listen on {address(host, port)}: {reason}")


class GrpcServer(Protocol):
    """A gRPC port: GrpcioServer or Nghttp2Server."""

    async def listen(self, host: str, port: int, tls: Tls | None) -> int:
        """Open the port, and return its number. Raises OSError."""

    @property
    def is_connected(self) -> bool:
        """True while a client is connected."""

    def stop_listening(self) -> None:
        """Refuse new connections; open ones are served."""

    async def send_away(self) -> None:
        """Have clients send their next calls to other servers, where the library can (GOAWAY)."""

    async def close(self) -> None:
        """End all connections."""


class Listeners:
    """Opens ports, then close() once, on one event loop."""

    def __init__(self, limits: Limits, shares_ports: bool = False) -> None:
        """shares_ports: True if other processes of this server listen on them."""
        self._limits, self._shares_ports = limits, shares_ports
        self._grpc: GrpcServer | None = None
        self._http: list[HttpServer] = []

    async def listen_http(self, host: str, port: int, handle: Handler, tls: Tls | None = None) -> int:
        """Open an HTTP port, and return its number. Raises OSError."""
        try:
            server = await listen(host, port, handle, self._limits, tls, self._shares_ports)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        self._http.append(server)
        return server.port

    async def listen_grpc(self, server: GrpcServer, host: str, port: int, tls: Tls | None) -> int:
        """Open the port of a gRPC server, and return its number. Raises OSError."""
        self._grpc = server
        try:
            return await server.listen(host, port, tls)
        except OSError as error:
            raise cannot_listen(host, port, error) from error

    async def send_away(self) -> None:
        """Have clients over HTTP/2 send their next requests to other servers. To be called before these are refused."""
        await asyncio.gather(*(server.send_away() for server in (self._grpc, *self._http) if server))

    async def close(self, answered: bool) -> None:
        """Refuse new connections, wait until answers are sent, and end the connections.

        To be called when whatever comes is refused. answered: all that was accepted has been answered.
        """
        # What arrives meanwhile over gRPC is refused with a status that tells clients to go elsewhere.
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
        """Answer those that ask again at once, as long as anybody is connected who could."""
        for _ in range(_TAKING_IN_TURNS):
            await asyncio.sleep(0)
        end = time.monotonic() + _REFUSING_SECS
        while time.monotonic() < end and (any(http.is_connected for http in self._http)
                                          or self._grpc and self._grpc.is_connected):
            await asyncio.sleep(_LOOKING_SECS)
