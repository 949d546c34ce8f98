"""Peers of the channel tests: clients of both kinds behind one interface, a scripted server, and a proxy."""
from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from infer_server.clients import AsyncInferenceClient, InferenceClient
from infer_server.protos import inference as pb
from infer_server.protos.grpc_framing import prefix_of
from infer_server.protos.http2 import (
    Connection,
    DataReceived,
    Event,
    Header,
    NGH2Error,
    RequestReceived,
    StreamClosed,
    server_connection,
)
from tests.clients.server import TIMEOUT_SECS

KINDS = ("blocking", "aio")
LIVE: bytes = pb.ServerLiveResponse(live=True).SerializeToString()


class _Awaited:
    """AsyncInferenceClient with blocking methods, called from a thread beside its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: AsyncInferenceClient) -> None:
        self._loop, self._client = loop, client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._run(getattr(self._client, name)(*args, **kwargs))

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_SECS)


@contextmanager
def client_of(kind: str, url: str, **options: Any) -> Iterator[Any]:
    """Yield an InferenceClient, or an AsyncInferenceClient whose methods wait for their results."""
    if kind == "blocking":
        with InferenceClient(url, **options) as client:
            yield client
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def create() -> AsyncInferenceClient:
        return AsyncInferenceClient(url, **options)

    client = asyncio.run_coroutine_threadsafe(create(), loop).result(TIMEOUT_SECS)
    try:
        yield _Awaited(loop, client)
    finally:
        asyncio.run_coroutine_threadsafe(client.close(), loop).result(TIMEOUT_SECS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(TIMEOUT_SECS)
        loop.close()


def keepalive_secs(client: Any) -> float:
    """Return the client's current keepalive interval in seconds, which servers can lengthen."""
    channel = (client._client if isinstance(client, _Awaited) else client)._channel
    return float(channel._keepalive.secs)


class Peer:
    """Connection of the scripted server."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.socket = number, connection
        self.http2: Connection = server_connection(100, 1 << 20)
        self.events: list[Event] = []
        self.calls = 0

    def answer(self, stream: int, message: bytes = LIVE, status: int = 0, *fields: Header, flag: bytes = b"\0",
               coding: bytes = b"identity") -> None:
        http2 = self.http2
        http2.send_response(stream, ((b":status", b"200"), (b"content-type", b"application/grpc"),
                                     (b"grpc-encoding", coding)))
        http2.send_data(stream, flag + prefix_of(len(message))[1:] + message)
        http2.send_trailers(stream, ((b"grpc-status", b"%d" % status), *fields))

    def fail(self, stream: int, status: int, *fields: Header) -> None:
        """Answer with trailers only."""
        self.http2.send_response(stream, ((b":status", b"200"), (b"content-type", b"application/grpc"),
                                          (b"grpc-status", b"%d" % status), *fields), end_stream=True)


Handler = Callable[[Peer, int, dict[bytes, bytes]], None]  # called with the connection, a stream number and its headers


@dataclass
class Scripted:
    """Server on libnghttp2 whose answers a test scripts; `requests` has the headers of every call."""
    handle: Handler
    requests: list[dict[bytes, bytes]] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    ended: threading.Condition = field(default_factory=threading.Condition)

    def converse(self, connection: socket.socket) -> None:
        peer = Peer(len(self.peers), connection)
        self.peers.append(peer)
        open_calls: dict[int, dict[bytes, bytes]] = {}
        with connection, suppress(OSError, NGH2Error):
            connection.sendall(peer.http2.data_to_send())
            while data := connection.recv(1 << 16):
                peer.http2.receive_data(data)
                for event in peer.http2.events():
                    with self.ended:
                        peer.events.append(event)
                        self.ended.notify_all()
                    if isinstance(event, RequestReceived):
                        open_calls[event.stream_id] = {header[0]: header[1] for header in event.headers}
                    elif isinstance(event, DataReceived):
                        peer.http2.acknowledge_received_data(len(event.data), event.stream_id)
                        if event.end_stream:
                            peer.calls += 1
                            self.requests.append(open_calls.pop(event.stream_id))
                            self.handle(peer, event.stream_id, self.requests[-1])
                connection.sendall(peer.http2.data_to_send())

    def waits_for_reset(self) -> int:
        """Return the error code of the first stream that the client resets."""
        def codes() -> list[int]:
            return [event.error_code for peer in self.peers for event in peer.events
                    if isinstance(event, StreamClosed) and event.error_code]

        with self.ended:
            assert self.ended.wait_for(codes, TIMEOUT_SECS)
        return codes()[0]


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the address of a listener that serves each connection in a thread."""
    threads: list[threading.Thread] = []
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def accept() -> None:
            with suppress(OSError):
                while True:
                    connections.append(listener.accept()[0])
                    threads.append(threading.Thread(target=serve, args=(connections[-1],)))
                    threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(TIMEOUT_SECS)
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(TIMEOUT_SECS)
            for connection in connections:
                connection.close()


@contextmanager
def scripted(handle: Handler) -> Iterator[tuple[str, Scripted]]:
    server = Scripted(handle)
    with listening(server.converse) as url:
        yield url, server


class Proxy:
    """Proxy that forwards connections to a server, and can cut them."""

    def __init__(self, upstream: str) -> None:
        self.upstream: str | None = upstream        # None: connections are closed as soon as they are made
        self.count = 0                              # number of connections so far
        self._open: list[socket.socket] = []

    def cut(self) -> None:
        """End all connections."""
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def forward(self, client: socket.socket) -> None:
        self.count += 1
        if self.upstream is None:
            client.close()
            return
        host, _, port = self.upstream.partition(":")
        with client, socket.create_connection((host, int(port))) as server:
            self._open += [client, server]
            back = threading.Thread(target=_copy, args=(server, client))
            back.start()
            _copy(client, server)
            back.join(TIMEOUT_SECS)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy_to(upstream: str) -> Iterator[tuple[str, Proxy]]:
    proxy = Proxy(upstream)
    with listening(proxy.forward) as url:
        try:
            yield url, proxy
        finally:
            proxy.cut()
