"""Replica of Ray Serve: a server without ports of its own.

Behind HAProxy the gRPC server of the replica calls it by the handlers of servicer.py. Behind Serve's Python proxy,
Serve calls the methods of the deployment, which have the names of the gRPC methods.
"""
from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from typing import Any, Protocol

import grpc

from infer_server.endpoints.grpc.errors import GrpcStatusError
from infer_server.errors import UnavailableError
from infer_server.ray.autoscaling import Meter
from infer_server.ray.options import server_options
from infer_server.ray.servicer import METHODS, WATCH, serve_in_replica
from infer_server.server import Server

_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"


class ServeContext(Protocol):
    """Interface of the context that Serve passes: ray.serve.grpc_util.RayServegRPCContext."""

    def invocation_metadata(self) -> list[tuple[str, Any]]: ...

    def peer(self) -> str: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...


class Serialised:
    """Response that is serialised already; Serve asks each response to serialise itself."""
    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


_NONE = Serialised(b"")         # response of a call that has failed


class InferServer:
    """The deployment: a server whose methods are those of our gRPC services, with bytes in place of messages."""
    server: Server

    async def __init__(self, arguments: Sequence[str], allow_python_proxy: bool = False) -> None:       # type: ignore[misc]
        """Start the server and load its models.

        Parameters
        ----------
        arguments : sequence of str
            Options of the command infer-server, without those of ports.
        allow_python_proxy : bool
            True to serve behind Serve's own proxy.

        Raises
        ------
        RuntimeError
            Calls would pass Serve's own proxy, or a model cannot be loaded.
        """
        if not (allow_python_proxy or os.environ.get(_HAPROXY) == "1"):
            raise RuntimeError(
                "a call through Ray Serve's Python proxy costs 14 to 21 times the CPU time of infer-server: start Ray "
                f"on every node with {_HAPROXY}=1 and RAY_SERVE_THROUGHPUT_OPTIMIZED=1, or pass "
                "allow_python_proxy=true")
        options = server_options(arguments)
        self.server = Server(options)
        await self.server.start()
        await self.server.loaded()
        if options.strict_readiness and (failures := self.server.failures()):
            await self.close()
            raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in failures.items()))
        self._meter = Meter(options.cores)
        serve_in_replica(self.server.grpc.methods_except(WATCH, around=self._meter.counted))

    def check_health(self) -> None:
        """Raise UnavailableError if a restart of the replica is the remedy: its repository cannot be read."""
        if not self.server.lifecycle.live:
            raise UnavailableError("; ".join(f"{name}: {why}" for name, why in self.server.failures().items()))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics of this replica for the autoscaling policy. A coroutine, to run on the event loop."""
        return self._meter.read()

    async def close(self) -> None:
        """Answer the requests in flight and stop."""
        await self.server.stop()


def _unary(path: str) -> Callable[..., Awaitable[Serialised]]:
    async def call(self: InferServer, request: bytes, grpc_context: ServeContext) -> Serialised:
        try:
            return Serialised(await self.server.grpc.call(
                path, request, metadata=grpc_context.invocation_metadata(), peer=grpc_context.peer()))
        except GrpcStatusError as error:
            _refuse(grpc_context, error)
            return _NONE
    return call


def _stream(path: str) -> Callable[..., AsyncGenerator[Serialised, None]]:
    async def call(self: InferServer, requests: AsyncIterable[bytes], grpc_context: ServeContext
                   ) -> AsyncGenerator[Serialised, None]:
        try:
            async for response in self.server.grpc.stream(
                    path, requests, metadata=grpc_context.invocation_metadata(), peer=grpc_context.peer()):
                yield Serialised(response)
        except GrpcStatusError as error:
            _refuse(grpc_context, error)
    return call


def _refuse(context: ServeContext, error: GrpcStatusError) -> None:
    """Set the status of a call. An exception would have Serve log a traceback for each mistake of a client."""
    context.set_code(error.code)
    context.set_details(error.details)


for _method in METHODS:
    _call = (_stream if _method.server_streaming else _unary)(_method.path)
    _call.__name__ = _method.name
    setattr(InferServer, _method.name, _call)
