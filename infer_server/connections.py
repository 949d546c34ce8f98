"""Ends TCP connections of this process from outside of the library that owns them.

gRPC for Python has no way to close a connection, and ends calls that it has not handed out yet with CANCELLED when it
stops; no client repeats those. A client whose connection closes gets UNAVAILABLE, and asks another server.
"""
from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import unquote

_DESCRIPTORS = "/dev/fd"            # of this process; Linux and macOS have it


def disconnect(port: int, peer: str = "") -> None:
    """Ends the connections to a port of this process: all, or those of one peer as gRPC writes it."""
    for connection in _sockets(port):
        if not peer or unquote(peer) == _peer(connection):
            _shut_down(connection)


def _shut_down(end: socket.socket) -> None:
    with suppress(OSError):             # its other end was faster
        end.shutdown(socket.SHUT_RDWR)


def _sockets(port: int) -> Iterator[socket.socket]:
    """The connected TCP sockets of a local port.

    Each is a duplicate, which lives for its turn: another thread may close the original, and open something else in its
    place, at any time.
    """
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):
            duplicate = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
                os.close(duplicate)
                continue
            with socket.socket(fileno=duplicate) as end:
                if _is_connected_to(end, port):
                    yield end


def _is_connected_to(end: socket.socket, port: int) -> bool:
    return (end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM
            and bool(end.getsockname()[1] == port) and not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _peer(connection: socket.socket) -> str:
    """The other end as gRPC writes it: ipv4:127.0.0.1:5000, ipv6:[::1]:5000; nothing if it has gone."""
    try:
        address, port = connection.getpeername()[:2]
    except OSError:
        return ""
    return f"ipv4:{address}:{port}" if connection.family == socket.AF_INET else f"ipv6:[{address}]:{port}"
