"""Servers on grpc.aio: what all of them are set to, and those that other fronts hand their calls on to."""
from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping

import grpc


def _concerns_us(record: logging.LogRecord) -> bool:
    """Whether gRPC complains of something else than a client that went away while its answer was being sent."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


logging.getLogger("grpc._cython.cygrpc").addFilter(_concerns_us)


def aio_server(max_message_bytes: int, channel: Mapping[str, int], shares_port: bool = False) -> grpc.aio.Server:
    """A server without handlers and ports. Messages that are too large get RESOURCE_EXHAUSTED. channel: settings of the
    C core, by name. shares_port: with other processes of this server."""
    return grpc.aio.server(options=[
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.per_message_decompression", 0),      # it has no limit: see compression
        ("grpc.so_reuseport", int(shares_port)),    # a second server on the port is a mistake, not a share of the load
        *channel.items(),
    ])


class Client:
    """The client of a call, for Inflight."""

    def __init__(self, context: grpc.aio.ServicerContext, disconnect: Callable[[str], None]) -> None:
        """disconnect: ends the connection of a peer as gRPC names it."""
        self.peer = context.peer
        self._headers = context.invocation_metadata
        self._disconnect = disconnect

    def headers(self) -> Iterable[tuple[str, str]]:
        """What came beside the call, but for bytes."""
        return ((name, value) for name, value in self._headers() or () if isinstance(value, str))

    def disconnect(self) -> None:
        self._disconnect(self.peer())


class Behind:
    """A server behind other fronts of this machine: it has a socket that only they find, and no port."""

    def __init__(self, server: grpc.aio.Server) -> None:
        """server: not started, without ports."""
        self._server = server
        self._folder = ""

    async def start(self) -> str:
        """The path of its socket."""
        self._folder = tempfile.mkdtemp(prefix="infer-server-")
        path = f"{self._folder}/grpc"
        self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        return path

    async def stop(self, grace: float | None) -> None:
        await self._server.stop(grace)
        shutil.rmtree(self._folder, ignore_errors=True)
