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
class CallOptions:
    """Properties of a call beside its messages."""
    metadata: Iterable[tuple[str, Any]] = ()        # names in lower case; values are str, or bytes for names in -bin
    timeout_secs: float | None = None               # time until the client's deadline
    peer: str = ""                                  # client's address in gRPC's notation


class InProcessCalls:
    """Caller of the methods of a server. Belongs to the event loop."""

    def __init__(self, methods: Methods, max_message_bytes: int) -> None:
        self._methods, self._max_message_bytes = methods, max_message_bytes

    async def call(self, path: str, request: bytes, options: CallOptions) -> bytes:
        """See Server.grpc_call."""
        serve = self._find(path, is_stream=False)
        context = _UnaryContext(options, self._max_message_bytes, request)
        try:
            await _serve(serve, context)
        except Exception as error:
            raise _status(error, options.peer) from None
        finally:
            context.close()
        return context.response

    async def stream(self, path: str, requests: AsyncIterable[bytes], options: CallOptions
                     ) -> AsyncGenerator[bytes, None]:
        """See Server.grpc_stream."""
        serve = self._find(path, is_stream=True)
        context = _StreamContext(options, self._max_message_bytes, aiter(requests))
        work = asyncio.create_task(context.run(serve))
        try:
            while (response := await context.responses.get()) is not None:
                if isinstance(response, Exception):
                    raise _status(response, options.peer) from None
                yield response
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            context.close()

    def _find(self, path: str, is_stream: bool) -> Serve:
        serve = self._methods.find(path)
        if serve is None:
            raise _status(NotServedError(f"'{path}' is no method of this server; methods are named like "
                                         f"/{protos.INFERENCE_SERVICE}/ModelInfer"), "")
        if is_stream != (path in _STREAMS):
            raise ValueError(f"{path} is {'a unary call: use grpc_call' if is_stream else 'a stream: use grpc_stream'}")
        return serve


@dataclass
class _Context:
    """CallContext of a call from this process, without its messages."""
    options: CallOptions
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

    def __init__(self, options: CallOptions, max_message_bytes: int, requests: AsyncIterator[bytes]) -> None:
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
