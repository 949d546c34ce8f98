"""Exchange of a request and its response between a connection and a handler."""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any, ClassVar, Protocol, TypeVar

from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, error_response, response_of
from infer_server.endpoints.inflight import OpenCall
from infer_server.errors import CancelledError, ServeError
from infer_server.protocol.json_values import Steps
from infer_server.protocol.redaction import public_text

log = logging.getLogger(__name__)
T = TypeVar("T")


class Handler(Protocol):
    """Callable that answers a request, now or later, by exchange.respond()."""

    def __call__(self, exchange: Exchange) -> None: ...


class Connection(Protocol):
    """Interface of the connection of a request: HttpConnection or RequestStream."""
    exchange: Exchange | None           # exchange being answered

    def respond(self, exchange: Exchange, response: HttpResponse) -> None: ...

    def begin(self, content_type: str, chunked: bool) -> None: ...

    def part(self, piece: bytes) -> None: ...

    def end(self, exchange: Exchange) -> None: ...


class Exchange:
    """A request and its response. Belongs to the event loop."""
    __slots__ = ("request", "open_call", "_connection", "left", "more_headers")
    _tasks: ClassVar[set[asyncio.Task[None]]] = set()       # the loop itself keeps no task alive

    def __init__(self, connection: Connection, request: HttpRequest, open_call: OpenCall) -> None:
        self.request, self.open_call, self._connection = request, open_call, connection
        self.left: Callable[[], None] | None = None     # called if the client disconnects before the response
        self.more_headers: Callable[[], Mapping[str, str]] | None = None    # returns headers to add to the response

    def answer_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine that answers the exchange; an exception of it becomes the response."""
        async def run() -> None:
            try:
                await work
            except Exception as error:
                self.fail(error)

        task = asyncio.ensure_future(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def while_present(self, steps: Steps[T]) -> Steps[T]:
        """Run a generator while the client is connected. Raises CancelledError when it has disconnected."""
        while not self.gone:
            try:
                next(steps)
            except StopIteration as stop:
                result: T = stop.value
                return result
            yield
        raise CancelledError("its client has gone")

    def when_left(self, withdraw: Callable[[], None]) -> None:
        """Have `withdraw` called if the client disconnects before the response.

        The response drops the reference, which would otherwise be a cycle for the garbage collector.
        """
        if not self.gone:
            self.left = withdraw

    def leave(self) -> None:
        """Call the function of `when_left`, and drop the body, whose bytes are no longer counted.

        A request that waits for its model may keep the exchange alive.
        """
        if self.left:
            self.left()
            self.left = None
        self.request = self.request._replace(body=b"")

    @property
    def gone(self) -> bool:
        """True if the client has disconnected or has its response."""
        return self._connection.exchange is not self

    def respond(self, response: HttpResponse) -> None:
        if not self.gone:
            if self.more_headers:
                response = response._replace(headers={**response.headers, **self.more_headers()})
            self._connection.respond(self, response)

    def fail(self, error: Exception) -> None:
        """Respond with an error."""
        message = self.message_of(error)
        self.respond(response_of(error) if isinstance(error, ServeError) else
                     error_response(HTTPStatus.INTERNAL_SERVER_ERROR, message))

    def message_of(self, error: Exception) -> str:
        """Return the message of an error for the client; for an unexpected exception only its class, and log it."""
        if isinstance(error, ServeError):
            return public_text(error)
        log.error("%s %s failed", self.request.method, self.request.path, exc_info=error)
        return f"internal error: {type(error).__name__}"

    # ---- streamed responses: begin(), part() any number of times, end()
    def begin(self, content_type: str) -> None:
        if not self.gone:
            self._connection.begin(content_type, chunked=self.request.version == "1.1")

    def part(self, piece: bytes) -> None:
        if not self.gone:
            self._connection.part(piece)

    def end(self) -> None:
        if not self.gone:
            self._connection.end(self)
