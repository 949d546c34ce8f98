"""Ports that several processes of this server listen on: each is had once, by the process that starts them."""
from __future__ import annotations

import socket
from typing import Any

from infer_server.listeners import cannot_listen


class Reserved:
    """A port of this server, on which its processes may listen until it is closed, and no other server.

    Its sockets do not listen: the system shares connections out among those that do. Those of other programs are among
    them if they are the same user's and ask for SO_REUSEPORT before they are bound.
    """

    def __init__(self, host: str, port: int) -> None:
        """port: 0 is any free one. Raises OSError: it cannot be had."""
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
        # Only now: what is bound with either may be bound beside a socket of another server that has it, too, and that
        # does not listen. The first was for connections of a server before, which the system has not forgotten yet.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port = bound.getsockname()[1]
