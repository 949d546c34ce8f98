"""Reservation of ports that are opened later, or by several processes of this server (SO_REUSEPORT)."""
from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

from infer_server.frontend_workers.settings import ListenAddress
from infer_server.listeners import cannot_listen


class ReservedPorts:
    """Reserved ports of a server."""

    def __init__(self) -> None:
        self._reserved: list[Reserved] = []

    def reserve(self, address: ListenAddress) -> ListenAddress:
        """Reserve a port and check its certificates; return the address with the port's number, a free one if it was 0.

        Raises OSError if the port cannot be bound or the certificates cannot be read.
        """
        if address.tls:
            address.tls.context()
        self._reserved.append(reserved := Reserved(address.host, address.port))
        return replace(address, port=reserved.port)

    def close(self) -> None:
        for reserved in self._reserved:
            reserved.close()


class Reserved:
    """Port on which the processes of this server may listen until it is closed, and no other server.

    Its sockets are bound but do not listen: the system distributes connections among those that do. A program of the
    same user that sets SO_REUSEPORT before it binds could listen, too.
    """

    def __init__(self, host: str, port: int) -> None:
        """Bind a port, any free one if it is 0. Raises OSError if it is in use or not permitted."""
        self._sockets: list[socket.socket] = []
        self.port = port
        try:
            for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                                       flags=socket.AI_PASSIVE):
                self._bind(socket.socket(family, kind, protocol), *where)
        except OSError as error:
            self.close()
            raise cannot_listen(host, port, error) from error

    def close(self) -> None:
        for each in self._sockets:
            each.close()

    def _bind(self, bound: socket.socket, host: Any, _: Any, *rest: Any) -> None:
        self._sockets.append(bound)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        bound.bind((host, self.port, *rest))
        # Changed only after bind: a socket bound with SO_REUSEPORT could share the port with another server that has
        # bound it and does not listen yet. SO_REUSEADDR was for connections of an earlier server in TIME_WAIT.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port = bound.getsockname()[1]
