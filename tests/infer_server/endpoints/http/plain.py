"""Helpers that send HTTP requests as bytes over plain sockets, or translate them to HTTP/2."""
from __future__ import annotations

import json
import socket
from http import HTTPStatus
from typing import Any, BinaryIO

import httptools
import numpy as np

from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.http2_client import Http2Client
from tests.infer_server.serving import RunningServer

CLOSE = "Connection: close"
version = "HTTP/1.1"            # that ask() speaks: the fixture `version` has tests run with "HTTP/2", too
_OF_CONNECTIONS = {b"connection", b"transfer-encoding", b"host", b"upgrade"}


def ask(server: RunningServer, *requests: bytes) -> bytes:
    """Send bytes; return everything received until the server closes the connection."""
    if version == "HTTP/2":
        return ask_over_http2(server, *requests)
    with socket.create_connection(("127.0.0.1", server.ports.http), timeout=TIMEOUT_SECS) as connection:
        for request in requests:
            connection.sendall(request)
        received = b""
        while data := connection.recv(1 << 16):
            received += data
    return received


class Translated:
    """Parser of HTTP/1.1 requests: their methods, targets, headers and bodies."""

    def __init__(self, data: bytes) -> None:
        self.requests: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]] = []
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._target, self._body, self._headers = b"", b"", list[tuple[bytes, bytes]]()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.requests.append((self._parser.get_method(), self._target, self._headers, self._body))


def ask_over_http2(server: RunningServer, *requests: bytes) -> bytes:
    """Send HTTP/1.1 requests over HTTP/2 and return the answers in the form of HTTP/1.1."""
    answers = []
    with Http2Client(server.ports.http) as client:
        for method, target, headers, body in Translated(b"".join(requests)).requests:
            host = next((value for name, value in headers if name == b"host"), b"x")
            fields, content = client.answer(client.request(
                [(b":method", method), (b":scheme", b"http"), (b":path", target), (b":authority", host),
                 *(each for each in headers if each[0] not in _OF_CONNECTIONS)], body))
            status = HTTPStatus(int(fields.pop(b":status")))
            lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(
                name.title() + b": " + value for name, value in fields.items())]
            answers.append(b"\r\n".join(lines) + b"\r\n\r\n" + content)
    return b"".join(answers)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def body_of(shape: object = (1, 4), data: object = (1, 2, 3, 4), also: object = None, **more: object) -> bytes:
    """Return an inference request as JSON. also: parameters of the request; more: further members of its input."""
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": data, **more}],
                       "parameters": also}).encode()


def post_large(values: np.ndarray[Any, Any], *headers: str) -> bytes:
    """Return a request with 1 MiB of binary data after its JSON."""
    head = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, values.size],
                                   "parameters": {"binary_data_size": values.nbytes}}],
                       "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    return post("/v2/models/large/infer", head + values.tobytes(), f"Inference-Header-Content-Length: {len(head)}",
                *headers)


def answer_from(stream: BinaryIO) -> bytes:
    """Return the body of the next response."""
    lines = list(iter(stream.readline, b"\r\n"))
    assert b" 200 " in lines[0], lines
    return stream.read(next(int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length")))
