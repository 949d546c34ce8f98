"""A bare unary gRPC server on libnghttp2: the lower bound of a Python server's cost per request.

    python -m benchmarks.transport.echo GRPC_PORT HTTP_PORT

Each call is answered with 64 bytes, ModelStatistics with an empty message, and every HTTP request with status 200.
"""
from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

from infer_server.process import tune_malloc
from infer_server.protos.grpc_framing import prefix_of
from infer_server.protos.http2 import DataReceived, RequestReceived, StreamClosed, server_connection

_RESPONSE = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_TRAILERS = ((b"grpc-status", b"0"),)
_ANSWER = prefix_of(64) + bytes(64)
_WINDOW_BYTES = 1 << 24


class _Calls(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._http2 = server_connection(1 << 20, _WINDOW_BYTES)
        self._bodies: dict[int, list[bytes]] = {}
        self._empty = set[int]()
        self._transport.write(self._http2.data_to_send())

    def data_received(self, data: bytes) -> None:
        http2, bodies = self._http2, self._bodies
        http2.receive_data(data)
        for event in http2.events():
            if isinstance(event, RequestReceived):
                bodies[event.stream_id] = []
                if any(value.endswith(b"/ModelStatistics") for name, value in event.headers if name == b":path"):
                    self._empty.add(event.stream_id)
            elif isinstance(event, DataReceived):
                stream = event.stream_id
                http2.acknowledge_received_data(len(event.data), stream)
                bodies[stream].append(event.data)
                if event.end_stream:
                    b"".join(bodies.pop(stream))
                    http2.send_response(stream, _RESPONSE)
                    http2.send_data(stream, prefix_of(0) if stream in self._empty else _ANSWER)
                    http2.send_trailers(stream, _TRAILERS)
            elif isinstance(event, StreamClosed):
                bodies.pop(event.stream_id, None)
                self._empty.discard(event.stream_id)
        if out := http2.data_to_send():
            self._transport.write(out)


class _Health(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self._transport.close()


async def _serve(grpc_port: int, http_port: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(_Calls, "127.0.0.1", grpc_port)
    await (await loop.create_server(_Health, "127.0.0.1", http_port)).serve_forever()


if __name__ == "__main__":
    tune_malloc()
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
