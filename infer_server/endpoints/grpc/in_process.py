"""gRPC calls from this process: messages pass as bytes, without a port and without HTTP/2."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from infer_server import protos
from infer_server.endpoints.grpc.context import Serve
from infer_server.endpoints.grpc.errors import GrpcStatusError, described
from infer_server.endpoints.grpc.methods import Methods
from infer_server.errors import DeadlineExceededError, MemoryLimitError, NotServedError

_STREAMS = frozenset(method.path for service in (protos.INFERENCE_SERVICE, protos.HEALTH_SERVICE)
                     for method in protos.methods(service) if method.server_streaming)


@dataclass(frozen=True)
class _Options:
    """Properties of a call other than its messages; see InProcessGrpc.call()."""
    metadata: Iterable[tuple[str, Any]]
    timeout_secs: float | None
    peer: str


class InProcessGrpc:
    """gRPC calls of a server by its own process, through the queues, limits and statistics of the ports.

    The server may have no ports at all: ``ServerOptions(closed=frozenset({"grpc", "http", "metrics"}))``. Call this on
    the event loop of the server, after start().
    """

    def __init__(self, methods: Methods, max_message_bytes: int) -> None:
        self._methods, self._max_message_bytes = methods, max_message_bytes

    async def call(self, method: str, request: bytes, *, metadata: Iterable[tuple[str, str | bytes]] = (),
                   timeout_secs: float | None = None, peer: str = "") -> bytes:
        """Make a unary call. If its task is cancelled, the call is cancelled.

        Parameters
        ----------
        method : str
            Path of the method: "/inference.GRPCInferenceService/ModelInfer", "/grpc.health.v1.Health/Check".
        request : bytes
            Serialised request message.
        metadata : iterable of tuple
            Pairs of a name in lower case and a value, which is bytes for names that end with "-bin".
        timeout_secs : float, optional
            Seconds until the client's deadline.
        peer : str
            Client's address in gRPC's notation, for logs: "ipv4:10.0.0.1:5000".

        Returns
        -------
        bytes
            Serialised response message.

        Raises
        ------
        GrpcStatusError
            The call has ended with a status other than OK.
        ValueError
            The method is a stream.
        """
        serve = self._find(method, is_stream=False)
        context = _UnaryContext(_Options(metadata, timeout_secs, peer), self._max_message_bytes, request)
        try:
            await _serve(serve, context)
        except Exception as error:
            raise _status(error, peer) from None
        finally:
            context.close()
        return context.response

    async def stream(self, method: str, requests: AsyncIterable[bytes], *,
                     metadata: Iterable[tuple[str, str | bytes]] = (), timeout_secs: float | None = None,
                     peer: str = "") -> AsyncGenerator[bytes, None]:
        """Make a streaming call: ModelStreamInfer, or Watch of grpc.health.v1.

        Close the generator (``contextlib.aclosing``) to cancel the call. A consumer that takes no response for
        send_timeout_secs ends it. See call() for the other parameters and errors.

        Parameters
        ----------
        requests : async iterable of bytes
            Serialised request messages. Several are in flight before the first response is consumed.

        Yields
        ------
        bytes
            Serialised response messages.
        """
        serve = self._find(method, is_stream=True)
        context = _StreamContext(_Options(metadata, timeout_secs, peer), self._max_message_bytes, aiter(requests))
        work = asyncio.create_task(context.run(serve))
        try:
            while (response := await context.responses.get()) is not None:
                if isinstance(response, Exception):
                    raise _status(response, peer) from None
                yield response
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            context.close()

    def methods_except(self, *paths: str, around: Callable[[Serve], Serve] = lambda serve: serve) -> Methods:
        """Return the methods of the server without some, for a gRPC server that another program owns.

        `around` returns what is called in place of a method.
        """
        def find(path: str) -> Serve | None:
            serve = None if path in paths else self._methods.find(path)
            return serve and around(serve)
        return Methods(find)

    def _find(self, path: str, is_stream: bool) -> Serve:
        serve = self._methods.find(path)
        if serve is None:
            raise _status(NotServedError(f"'{path}' is no method of this server; methods are named like "
                                         f"/{protos.INFERENCE_SERVICE}/ModelInfer"), "")
        if is_stream != (path in _STREAMS):
            raise ValueError(f"{path} is {'a unary call: use call()' if is_stream else 'a stream: use stream()'}")
        return serve


@dataclass
class _Context:
    """CallContext of a call from this process, without its messages."""
    options: _Options
    _max_message_bytes: int
    _done: list[Callable[[], None]] = field(default_factory=list, init=False)
    deadline: float | None = field(default=None, init=False)        # in the loop's time

    def __post_init__(self) -> None:
        if self.options.timeout_secs is not None:
            self.deadline = asyncio.get_running_loop().time() + self.options.timeout_secs

    def peer(self) -> str:
        return self.options.peer

    def metadata(self) -> Iterable[tuple[str, Any]]:
        return self.options.metadata

    def time_remaining(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - asyncio.get_running_loop().time())

    def disconnect(self) -> None:
        """Do nothing: there is no connection, and a stream that is not read ends with a status."""

    def checked(self, request: bytes) -> bytes:
        """Return a request. Raises MemoryLimitError if it is larger than a message may be."""
        if len(request) > self._max_message_bytes:
            raise MemoryLimitError(f"a message of {len(request)} bytes; it may have {self._max_message_bytes}")
        return request

    def when_done(self, callback: Callable[[], None]) -> None:
        self._done.append(callback)

    def close(self) -> None:
        for callback in self._done:
            callback()
        self._done.clear()


@dataclass
class _UnaryContext(_Context):
    """Context of a unary call."""
    _request: bytes | None
    response: bytes = field(default=b"", init=False)

    async def read(self) -> bytes | None:
        request, self._request = self._request, None
        return request and self.checked(request)

    async def write(self, message: bytes) -> None:
        self.response = message


class _StreamContext(_Context):
    """Context of a streaming call. It buffers one response: a client that does not read holds up the stream."""

    def __init__(self, options: _Options, max_message_bytes: int, requests: AsyncIterator[bytes]) -> None:
        super().__init__(options, max_message_bytes)
        self._requests = requests
        # Responses, and at the end None or the error that has ended the call.
        self.responses: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(maxsize=1)

    async def read(self) -> bytes | None:
        request = await anext(self._requests, None)
        return request and self.checked(request)

    async def write(self, message: bytes) -> None:
        await self.responses.put(message)

    async def run(self, serve: Serve) -> None:
        """Serve the call, and put its end behind the responses."""
        end: Exception | None = None
        try:
            await _serve(serve, self)
        except Exception as error:
            end = error
        await self.responses.put(end)


async def _serve(serve: Serve, context: _UnaryContext | _StreamContext) -> None:
    """Serve a call. Raises DeadlineExceededError once its deadline has passed."""
    if context.deadline is None:
        await serve(context)
        return
    try:
        async with asyncio.timeout_at(context.deadline) as limit:
            await serve(context)
    except TimeoutError:
        if limit.expired():
            raise DeadlineExceededError("Deadline Exceeded") from None
        raise


def _status(error: Exception, peer: str) -> GrpcStatusError:
    """Return the status of a call that has failed."""
    if isinstance(error, GrpcStatusError):
        return error
    code, details = described(error, peer)
    return GrpcStatusError(code.value[0], details)
