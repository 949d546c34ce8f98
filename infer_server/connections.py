"""Ends TCP connections of this process from outside of the library that owns them.

gRPC for Python has no way to close a connection, and ends calls that it has not handed out yet with CANCELLED when it
stops; no client repeats those. A client whose connection closes gets UNAVAILABLE, and asks another server.
"""
from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import unquote

_DESCRIPTORS = "/dev/fd"            # of this process; Linux and macOS have it


def stop_listening(port: int) -> None:
    """New connections to a port of this process are refused from now on."""
    for listener in _sockets(port, listening=True):
        _shut_down(listener)


def disconnect(port: int, peer: str = "") -> None:
    """Ends the connections to a port of this process: all, or those of one peer as gRPC writes it."""
    for connection in _sockets(port, listening=False):
        if not peer or unquote(peer) == _peer(connection):
            _shut_down(connection)


def _shut_down(end: socket.socket) -> None:
    with suppress(OSError):             # its other end was faster
        end.shutdown(socket.SHUT_RDWR)


def _sockets(port: int, listening: bool) -> Iterator[socket.socket]:
    """Duplicates of the TCP sockets of a local port, each for its turn: a descriptor may be another's by the next."""
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as duplicate:
            if (duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
                    and duplicate.getsockname()[1] == port
                    and bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening):
                yield duplicate


def _peer(connection: socket.socket) -> str:
    """The other end as gRPC writes it: ipv4:127.0.0.1:5000, ipv6:[::1]:5000; nothing if it has gone."""
    try:
        address, port = connection.getpeername()[:2]
    except OSError:
        return ""
    return f"ipv4:{address}:{port}" if connection.family == socket.AF_INET else f"ipv6:[{address}]:{port}"
