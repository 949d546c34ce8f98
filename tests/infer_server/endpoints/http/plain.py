"""HTTP requests as bytes, over plain sockets."""
from __future__ import annotations

import json
import socket
from typing import Any, BinaryIO

import numpy as np

from tests.infer_server.numpy_engine import TIMEOUT_SECS
from tests.infer_server.serving import RunningServer

CLOSE = "Connection: close"


def ask(server: RunningServer, *requests: bytes) -> bytes:
    """All that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.ports.http), timeout=TIMEOUT_SECS) as connection:
        for request in requests:
            connection.sendall(request)
        received = b""
        while data := connection.recv(1 << 16):
            received += data
    return received


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def body_of(shape: object = (1, 4), data: object = (1, 2, 3, 4), also: object = None, **more: object) -> bytes:
    """also: parameters of the request; more: members of its input."""
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": data, **more}],
                       "parameters": also}).encode()


def post_large(values: np.ndarray[Any, Any], *headers: str) -> bytes:
    """A request of 1 MiB behind its JSON."""
    head = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, values.size],
                                   "parameters": {"binary_data_size": values.nbytes}}],
                       "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    return post("/v2/models/large/infer", head + values.tobytes(), f"Inference-Header-Content-Length: {len(head)}",
                *headers)


def answer_from(stream: BinaryIO) -> bytes:
    """The body of the next response."""
    lines = list(iter(stream.readline, b"\r\n"))
    assert b" 200 " in lines[0], lines
    return stream.read(next(int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length")))
