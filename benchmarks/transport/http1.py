"""A closed loop of HTTP/1.1 requests over bare connections, one in flight on each, with negligible client cost."""
from __future__ import annotations

import selectors
import socket
import time

from benchmarks.transport.http2 import Ended

_READ_BYTES = 1 << 20


class Connections:
    """HTTP/1.1 connections, each with one request in flight, which is sent again when it is answered."""

    def __init__(self, port: int, path: str, headers: dict[str, str], body: bytes, at_a_time: int) -> None:
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}",
                 *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        self._request = "\r\n".join(lines).encode() + body
        self._selector = selectors.DefaultSelector()
        self._begun: dict[socket.socket, float] = {}
        self._received: dict[socket.socket, bytes] = {}
        for _ in range(at_a_time):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ)
            self._received[connection] = b""

    def run(self, seconds: float) -> Ended:
        """Keep the requests in flight for `seconds`, and return counts and latencies of those that ended."""
        ended = Ended()
        for connection in self._received:
            if connection not in self._begun:
                self._send_request(connection)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for key, _ in self._selector.select(0.2):
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj, ended)
        return ended

    def close(self) -> None:
        for connection in self._received:
            connection.close()
        self._selector.close()

    def _send_request(self, connection: socket.socket) -> None:
        self._begun[connection] = time.perf_counter()
        connection.sendall(self._request)

    def _read(self, connection: socket.socket, ended: Ended) -> None:
        data = connection.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the server closed a connection")
        answer = self._received[connection] + data
        if is_whole(answer):
            ended.answered += answer.startswith(b"HTTP/1.1 200")
            ended.failed += not answer.startswith(b"HTTP/1.1 200")
            ended.seconds.append(time.perf_counter() - self._begun[connection])
            answer = b""
            self._send_request(connection)
        self._received[connection] = answer


def is_whole(answer: bytes) -> bool:
    """Return True if a response with a Content-Length has arrived completely."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    length = next((line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")),
                  b"0")
    return len(body) >= int(length)
