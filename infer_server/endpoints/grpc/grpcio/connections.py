"""Ends TCP connections of this process, and sees what they carried, from outside of the library that owns them.

gRPC for Python has no way to close a connection, or to stop listening and go on answering; when it stops, it ends with
CANCELLED what it has not handed out yet, and no client repeats that. A client whose connection closes, or is refused,
gets UNAVAILABLE, and asks another server.
"""
from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import unquote

from infer_server.endpoints.inflight import Client, Inflight
from infer_server.process import resident_bytes

log = logging.getLogger(__name__)

_DESCRIPTORS = "/dev/fd"            # of this process; Linux and macOS have it
_TCP_INFO = 11                      # <linux/tcp.h>; where it means something else, it is too short
_BYTES_RECEIVED = struct.Struct("=128xQ")   # the field tcpi_bytes_received of struct tcp_info
_LOOKING_SECS = 0.25
_LOOKS = 20                                 # at what is received, before memory is taken for something else's
_TRACKED_SHARE = 1 / 8                      # of the limit of bytes in flight, of memory that nothing explains
_HELD_SHARE = 3 / 4                         # that messages on their way may hold
_CALL_BYTES = 300                           # of headers and frames beside a message


def stop_listening(port: int) -> None:
    """Refuses new connections to a port of this process from now on.

    The listening socket is not shut down, which its owner would take for a failure: it closes, as another socket, which
    nobody can reach, takes its descriptor.
    """
    for descriptor, listener in _sockets(port):
        if _listens(listener):
            with socket.socket(listener.family, socket.SOCK_STREAM) as unreachable:
                os.dup2(unreachable.fileno(), descriptor, inheritable=False)


def disconnect(port: int, peer: str = "") -> None:
    """Close the connections to a port of this process: all, or those of one peer in gRPC's notation."""
    for _, connection in _sockets(port):
        if not _listens(connection) and (not peer or unquote(peer) == _peer(connection)):
            with suppress(OSError):             # the client has closed it already
                connection.shutdown(socket.SHUT_RDWR)


def is_connected(port: int) -> bool:
    """Return True if a client is connected to a port of this process."""
    return any(not _listens(end) for _, end in _sockets(port))


class PartialMessages:
    """Ends connections whose unfinished messages hold too much memory.

    gRPC's core keeps a message until it is complete, and tells nobody: a client that announces 200 MB on each of many
    streams fills the memory of the machine. So the bytes that a connection has received are compared with those of the
    messages that came of it, as soon as the process has more memory than requests and models explain. Where they exceed
    three quarters of the limit of bytes in flight together, the connections with the most are ended. Belongs to the
    event loop.
    """

    def __init__(self, port: int, inflight: Inflight) -> None:
        self._port, self._inflight = port, inflight
        self._loop = asyncio.get_running_loop()
        self._floor_bytes = resident_bytes()            # of the process, as far as it is explained
        self._received: dict[str, int] = {}             # by peer, when it was looked at last; {}: not tracked
        self._pending: dict[str, int] = {}              # received since tracking began, and not delivered
        self._looks = 0                                 # since then
        self._looking = self._loop.call_later(_LOOKING_SECS, self._look)

    def close(self) -> None:
        self._looking.cancel()
        self._inflight.on_message = None

    def delivered(self, client: Client, count: int) -> None:
        """To be called when a message of `count` bytes is complete."""
        peer = unquote(client.peer())
        if peer in self._pending:
            self._pending[peer] -= count + _CALL_BYTES

    def _look(self) -> None:
        self._looking = self._loop.call_later(_LOOKING_SECS, self._look)
        most, unexplained = self._inflight.max_bytes, resident_bytes() - self._inflight.held_bytes
        self._floor_bytes = min(self._floor_bytes, unexplained)
        if unexplained - self._floor_bytes < _TRACKED_SHARE * most:
            self._received, self._pending, self._inflight.on_message, self._looks = {}, {}, None, 0
            return
        self._track()
        self._looks += 1
        left = sum(self._pending.values())
        if left <= _HELD_SHARE * most:
            if self._looks >= _LOOKS and left < _TRACKED_SHARE * most:
                self._floor_bytes = unexplained         # it is something else's: a model was loaded
            return
        for peer in sorted(self._pending, key=self._pending.__getitem__, reverse=True):
            if left <= _HELD_SHARE * most:
                break
            left -= self._pending.pop(peer)
            log.warning("%s has sent %d MiB of messages that are not complete: its connection is closed", peer,
                        self._received[peer] >> 20)
            disconnect(self._port, peer)

    def _track(self) -> None:
        received = dict(_received_bytes(self._port))
        for peer, count in received.items():
            before = self._received.get(peer, count if not self._received else 0)
            self._pending[peer] = max(0, self._pending.get(peer, 0) + count - before)
        self._pending = {peer: count for peer, count in self._pending.items() if peer in received}
        self._received, self._inflight.on_message = received, self.delivered


def _received_bytes(port: int) -> Iterator[tuple[str, int]]:
    """The connections to a port, by their peers, and the bytes that each has received since it began."""
    for _, end in _sockets(port):
        with suppress(OSError, struct.error):
            if not _listens(end):
                info = end.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED.size)
                yield _peer(end), _BYTES_RECEIVED.unpack(info)[0]


def _sockets(port: int) -> Iterator[tuple[int, socket.socket]]:
    """The TCP sockets of a local port: the descriptor, and a duplicate of it that lives for its turn.

    A duplicate, because another thread may close the original, and open something else in its place, at any time. None
    are found where the system has no such folder, or this process no descriptor left to look with.
    """
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(_DESCRIPTORS)
    for name in names:
        with suppress(OSError), _duplicate(int(name)) as end:
            internet = end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM
            if internet and end.getsockname()[1] == port:
                yield int(name), end


def _duplicate(descriptor: int) -> socket.socket:
    """Raises OSError: it is no socket."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _listens(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _peer(connection: socket.socket) -> str:
    """The other end as gRPC writes it: ipv4:127.0.0.1:5000, ipv6:[::1]:5000; nothing if it has gone."""
    try:
        address, port = connection.getpeername()[:2]
    except OSError:
        return ""
    address = address.removeprefix("::ffff:")           # IPv4 on a socket for both
    return f"ipv6:[{address}]:{port}" if ":" in address else f"ipv4:{address}:{port}"
