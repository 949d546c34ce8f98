"""The gRPC port on grpcio's asyncio server (`--grpc-front grpcio`)."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import grpc

from infer_server.endpoints.grpc.context import Serve, requests_load_report
from infer_server.endpoints.grpc.errors import described
from infer_server.endpoints.grpc.grpcio import connections
from infer_server.endpoints.grpc.methods import INFER_PATH, Methods
from infer_server.endpoints.inflight import Inflight
from infer_server.endpoints.tls import ServerTls
from infer_server.observing.load_report import TRAILER


def _concerns_us(record: logging.LogRecord) -> bool:
    """Return False for gRPC's log record of a client that disconnected during its response."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


logging.getLogger("grpc._cython.cygrpc").addFilter(_concerns_us)


class GrpcioServer:
    """gRPC port on grpc.aio. Call listen() once, then close() once, on one event loop."""

    def __init__(self, methods: Methods, inflight: Inflight, max_message_bytes: int, channel: Mapping[str, int],
                 shares_port: bool = False) -> None:
        """Create the server without opening the port.

        Parameters
        ----------
        methods : Methods
            Calls that are served.
        inflight : Inflight
            Counts the bytes of messages.
        max_message_bytes : int
            Maximum size of a message; larger ones get RESOURCE_EXHAUSTED.
        channel : mapping of str to int
            Channel arguments of gRPC's C core by name.
        shares_port : bool
            True if other processes of this server listen on the port.
        """
        self._inflight, self._port, self._is_plain = inflight, 0, True
        self._partial: connections.PartialMessages | None = None
        self._server = grpc.aio.server(options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.per_message_decompression", 0),      # it has no limit: see compression.py
            ("grpc.so_reuseport", int(shares_port)),    # by default two servers may listen on a port
            *channel.items(),
        ])
        self._server.add_generic_rpc_handlers((Handlers(methods, self._disconnect),))

    async def listen(self, host: str, port: int, tls: ServerTls | None) -> int:
        """Open the port; returns its number, which is chosen if `port` is 0. Raises OSError."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._is_plain = tls is None
        try:
            self._port = self._server.add_secure_port(address, tls.grpc_credentials()) if tls else (
                self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError("the port is taken, or this machine has no such address") from error
        self._partial = connections.PartialMessages(self._port, self._inflight)
        await self._server.start()
        return self._port

    @property
    def is_connected(self) -> bool:
        return bool(self._port) and connections.is_connected(self._port)

    def stop_listening(self) -> None:
        """Refuse new connections; open ones are served."""
        if self._partial:
            self._partial.close()
        if self._port:
            connections.stop_listening(self._port)

    async def send_away(self) -> None:
        """Refuse new connections and send GOAWAY; over TLS, clients get a status at their next calls instead."""
        self.stop_listening()
        if self._port and self._is_plain:
            await connections.send_away(self._port)

    async def close(self) -> None:
        """End all connections."""
        # A grpc.aio server that stops cancels the calls that it has not handed out yet, and no client repeats these:
        # before it does, nobody is connected any more.
        if self._port:
            connections.disconnect(self._port)
        await self._server.stop(0)

    def _disconnect(self, peer: str) -> None:
        if self._port:
            connections.disconnect(self._port, peer)


class Handlers(grpc.GenericRpcHandler):    # type: ignore[misc]     # grpc has no types
    """Handlers of all calls, on bytes: gRPC would report an exception of a deserialiser as a fault of the server."""

    def __init__(self, methods: Methods, disconnect: Callable[[str], None]) -> None:
        self._methods, self._disconnect = methods, disconnect

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        serve = self._methods.find(details.method)
        if serve is None:
            return None
        if details.method == INFER_PATH:        # a unary handler costs less
            return grpc.unary_unary_rpc_method_handler(partial(self._unary, serve))
        return grpc.stream_stream_rpc_method_handler(partial(self._serve, serve))

    async def _unary(self, serve: Serve, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        call = _UnaryContext(context, self._disconnect, data)
        del data
        await self._answer(serve, call, context)
        if (reports := self._methods.load_report) and requests_load_report(call.metadata()):
            context.set_trailing_metadata(((TRAILER, reports()),))
        return call.answer

    async def _serve(self, serve: Serve, _: Any, context: grpc.aio.ServicerContext) -> None:
        await self._answer(serve, _Context(context, self._disconnect), context)

    async def _answer(self, serve: Serve, call: _Context, context: grpc.aio.ServicerContext) -> None:
        try:
            await serve(call)
            return
        except Exception as error:
            code, details = described(error, context.peer())
        # gRPC keeps the exception of abort(), which must not reference the request or the frames of the error.
        await context.abort(code, details)
        raise AssertionError("abort() returned")


class _Context:
    """CallContext that wraps grpc.aio's context."""

    def __init__(self, context: grpc.aio.ServicerContext, disconnect: Callable[[str], None]) -> None:
        self._context, self._disconnect = context, disconnect
        self.peer: Callable[[], str] = context.peer
        self.time_remaining: Callable[[], float | None] = context.time_remaining

    async def read(self) -> bytes | None:
        data = await self._context.read()
        return None if data is grpc.aio.EOF else data

    async def write(self, message: bytes) -> None:
        await self._context.write(message)

    def metadata(self) -> Iterable[tuple[str, Any]]:
        return self._context.invocation_metadata() or ()

    def disconnect(self) -> None:
        self._disconnect(self._context.peer())

    def when_done(self, callback: Callable[[], None]) -> None:
        self._context.add_done_callback(lambda _: callback())


class _UnaryContext(_Context):
    """Context of a unary call: its message has arrived, and its handler returns the response."""

    def __init__(self, context: grpc.aio.ServicerContext, disconnect: Callable[[str], None], data: bytes) -> None:
        super().__init__(context, disconnect)
        self._data: bytes | None = data
        self.answer = b""

    async def read(self) -> bytes | None:
        data, self._data = self._data, None
        return data

    async def write(self, message: bytes) -> None:
        self.answer = message
