"""Control of TCP connections that gRPC owns: ends them and reads their byte counts from outside the library.

gRPC for Python cannot close a connection, send GOAWAY, or stop listening while it serves open calls. When it stops,
calls that were not dispatched yet end with CANCELLED, which clients do not retry. A client whose connection is closed
or refused gets UNAVAILABLE and tries another server; one that receives GOAWAY sends its next calls to another server.
"""
from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import unquote

from infer_server.endpoints.inflight import Client, Inflight
from infer_server.process import resident_bytes

log = logging.getLogger(__name__)

_DESCRIPTORS = "/dev/fd"            # descriptors of this process, on Linux and macOS
_TCP_INFO = 11                      # <linux/tcp.h>; on other systems the option's value is too short to be unpacked
_BYTES_RECEIVED = struct.Struct("=128xQ")   # the field tcpi_bytes_received of struct tcp_info
_CHECK_SECS = 0.25
_MIN_CHECKS = 20                            # checks after which unexplained memory is attributed to other causes
_TRACKED_SHARE = 1 / 8                      # unexplained memory, as a share of the limit, from which bytes are tracked
_PARTIAL_SHARE = 3 / 4                      # share of the limit that partial messages may hold
_CALL_BYTES = 300                           # bytes of headers and frames of a message
# HTTP/2 frame GOAWAY with the highest stream number and NO_ERROR: a notice that a graceful shutdown begins, after which
# the server still accepts calls that the client sent before it read the notice (RFC 9113, section 6.8).
_GOAWAY = struct.pack(">IBIII", 8 << 8 | 7, 0, 0, (1 << 31) - 1, 0)
_INT = struct.Struct("i")
_SETTLED_CHECKS = 2                         # checks in a row that find a short send queue before GOAWAY is written
_WRITING_SECS = 0.05                        # interval between these checks
_LEAVING_SECS = 1.0                         # time for clients to read GOAWAY and to leave


def stop_listening(port: int) -> None:
    """Refuse new connections to a port of this process.

    Shutting the listening socket down would look like a failure to its owner. Instead its descriptor is replaced by an
    unreachable socket, which closes it.
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


async def send_away(port: int) -> None:
    """Send GOAWAY to the clients of a port without TLS, and wait until they have left, at most _LEAVING_SECS.

    gRPC writes whole frames unless the socket's buffer is full. GOAWAY is therefore written only after consecutive
    checks found the buffer far from full, so that it cannot end up inside a frame.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + _LEAVING_SECS
    checks, notified = dict[str, int](), set[str]()
    while loop.time() < end and is_connected(port):
        for _, connection in _sockets(port):
            peer = _peer(connection)
            if _listens(connection) or not peer or peer in notified:
                continue
            checks[peer] = checks.get(peer, 0) + 1 if _is_writable(connection) else 0
            if checks[peer] >= _SETTLED_CHECKS:
                notified.add(peer)
                _send_goaway(connection)
        await asyncio.sleep(_WRITING_SECS)


def _is_writable(connection: socket.socket) -> bool:
    """Return True if less than a quarter of the send buffer is in use."""
    with suppress(OSError):
        queued: int = _INT.unpack(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(_INT.size)))[0]
        return queued < connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
    return False


def _send_goaway(connection: socket.socket) -> None:
    """Write GOAWAY; close the connection if only a part of the frame could be written."""
    with suppress(OSError):
        if connection.send(_GOAWAY, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) < len(_GOAWAY):
            connection.shutdown(socket.SHUT_RDWR)


def is_connected(port: int) -> bool:
    """Return True if a client is connected to a port of this process."""
    return any(not _listens(end) for _, end in _sockets(port))


class PartialMessages:
    """Limiter of the memory of partially received messages. Not thread-safe: belongs to the event loop.

    gRPC's core buffers a message until it is complete without reporting it: a client that sends parts of large messages
    on many streams could fill the machine's memory. When the process uses more memory than requests and models explain,
    the bytes that each connection has received are compared with the messages delivered from it. If the differences
    exceed three quarters of the limit of bytes in flight, the connections with the most are closed.
    """

    def __init__(self, port: int, inflight: Inflight) -> None:
        self._port, self._inflight = port, inflight
        self._loop = asyncio.get_running_loop()
        self._floor_bytes = resident_bytes()            # resident memory that is explained
        self._received: dict[str, int] = {}             # bytes by peer at the last check; {}: not tracked
        self._pending: dict[str, int] = {}              # bytes by peer since tracking began that were not delivered
        self._checks = 0                                # checks since tracking began
        self._timer = self._loop.call_later(_CHECK_SECS, self._check)

    def close(self) -> None:
        self._timer.cancel()
        self._inflight.on_message = None

    def delivered(self, client: Client, count: int) -> None:
        """Note that a message of `count` bytes is complete."""
        peer = unquote(client.peer())
        if peer in self._pending:
            self._pending[peer] -= count + _CALL_BYTES

    def _check(self) -> None:
        self._timer = self._loop.call_later(_CHECK_SECS, self._check)
        most, unexplained = self._inflight.max_bytes, resident_bytes() - self._inflight.held_bytes
        self._floor_bytes = min(self._floor_bytes, unexplained)
        if unexplained - self._floor_bytes < _TRACKED_SHARE * most:
            self._received, self._pending, self._inflight.on_message, self._checks = {}, {}, None, 0
            return
        self._track()
        self._checks += 1
        left = sum(self._pending.values())
        if left <= _PARTIAL_SHARE * most:
            if self._checks >= _MIN_CHECKS and left < _TRACKED_SHARE * most:
                self._floor_bytes = unexplained         # other causes: a model was loaded
            return
        for peer in sorted(self._pending, key=self._pending.__getitem__, reverse=True):
            if left <= _PARTIAL_SHARE * most:
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
    """Yield the peer and the total received bytes of each connection to a port."""
    for _, end in _sockets(port):
        with suppress(OSError, struct.error):
            if not _listens(end):
                info = end.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED.size)
                yield _peer(end), _BYTES_RECEIVED.unpack(info)[0]


def _sockets(port: int) -> Iterator[tuple[int, socket.socket]]:
    """Yield the descriptor of each TCP socket of a local port, and a duplicate that is valid during the iteration.

    A duplicate is needed because another thread may close the original and reuse its number at any time. Yields nothing
    if the system has no such folder or the process has no free descriptor.
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
    """Return a duplicate of a socket's descriptor. Raises OSError if it is not a socket."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _listens(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _peer(connection: socket.socket) -> str:
    """Return the peer in gRPC's notation: ipv4:127.0.0.1:5000, ipv6:[::1]:5000; "" if it has disconnected."""
    try:
        address, port = connection.getpeername()[:2]
    except OSError:
        return ""
    address = address.removeprefix("::ffff:")           # IPv4 address on a dual-stack socket
    return f"ipv6:[{address}]:{port}" if ":" in address else f"ipv4:{address}:{port}"
