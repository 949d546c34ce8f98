"""The ports of a process that clients connect to: opened, and closed so that nobody loses an answer."""
from __future__ import annotations

import asyncio
import os
import time

import grpc

from infer_server.endpoints.grpc.connections import PartialMessages, disconnect, is_connected, stop_listening
from infer_server.endpoints.grpc.fast import FastServer
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
    """What is said of a port that cannot be had."""
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    return OSError(f"cannot listen on {address(host, port)}: {reason}")


class Listeners:
    """Opens ports, then close() once, on one event loop."""

    def __init__(self, limits: Limits, shares_ports: bool = False) -> None:
        """shares_ports: with other processes of this server, which has made sure that they are its own."""
        self._limits, self._shares_ports = limits, shares_ports
        self._grpc: grpc.aio.Server | FastServer | None = None
        self._grpc_port = 0
        self._partial: PartialMessages | None = None
        self._http: list[HttpServer] = []

    async def listen_http(self, host: str, port: int, handle: Handler, tls: Tls | None = None) -> int:
        """The port. Raises OSError: it cannot be had."""
        try:
            server = await listen(host, port, handle, self._limits, tls, self._shares_ports)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        self._http.append(server)
        return server.port

    async def listen_grpc(self, server: grpc.aio.Server | FastServer, host: str, port: int, tls: Tls | None) -> int:
        """Starts a server, and returns its port. Raises OSError: it cannot be had."""
        wanted = address(host, port)
        try:
            if tls:
                assert not isinstance(server, FastServer)
                self._grpc_port = server.add_secure_port(wanted, tls.grpc_credentials())
            else:
                self._grpc_port = server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {wanted}: the port is taken, or this machine has no such address"
                          ) from error
        self._grpc = server
        self._partial = PartialMessages(self._grpc_port, self._limits.inflight)
        await server.start()
        return self._grpc_port

    def disconnect(self, peer: str) -> None:
        """Ends the connection of a peer as gRPC names it."""
        if self._grpc_port:
            disconnect(self._grpc_port, peer)

    async def close(self, answered: bool) -> None:
        """Refuses new connections, waits until answers are sent, and ends the connections. To be called when whatever
        comes is refused. answered: all that was accepted is."""
        # gRPC goes last: what arrives meanwhile is refused with a status that tells clients to go elsewhere. A gRPC
        # server that stops would cancel the calls that it has not handed out yet: before it does, nobody is connected
        # any more.
        if self._partial:
            self._partial.close()
        if self._grpc_port:
            stop_listening(self._grpc_port)
        await self._refuse()
        if answered:
            await self._limits.inflight.wait_sent(SENDING_SECS)
            if isinstance(self._grpc, FastServer):
                await self._grpc.wait_sent(SENDING_SECS)
        if self._grpc:
            disconnect(self._grpc_port)
            await self._grpc.stop(0)
        for http in self._http:
            http.close()

    async def _refuse(self) -> None:
        """Lets those be answered that ask again at once, for as long as anybody is connected who could."""
        for _ in range(_TAKING_IN_TURNS):
            await asyncio.sleep(0)
        end = time.monotonic() + _REFUSING_SECS
        while time.monotonic() < end and (any(http.is_connected for http in self._http)
                                          or self._grpc_port and is_connected(self._grpc_port)):
            await asyncio.sleep(_LOOKING_SECS)
