"""Reply to a ModelInfer call, which no coroutine serves."""
from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from infer_server.endpoints.grpc.context import CallContext, requests_load_report
from infer_server.endpoints.grpc.errors import GrpcStatusError, described
from infer_server.endpoints.inflight import OpenCall


class Cancels(Protocol):
    """Interface of a submitted request: serving.Submitted."""

    def cancel(self) -> None: ...


class InferReply(ABC):
    """The reply to a call of ModelInfer (batching.request.Reply), and its client (inflight.Client).

    Belongs to the event loop.
    """
    __slots__ = ("open_call", "submitted", "gone")

    def __init__(self) -> None:
        self.open_call: OpenCall | None = None      # counts the bytes of the call
        self.submitted: Cancels | None = None
        self.gone = False                           # True once the call has ended: answered, failed, or cancelled

    @abstractmethod
    def respond(self, response: bytes) -> None:
        """Send the serialised ModelInferResponse to the client."""

    @abstractmethod
    def refuse(self, code: int, details: str) -> None:
        """Send a status to the client."""

    @abstractmethod
    def peer(self) -> str: ...

    @abstractmethod
    def disconnect(self) -> None: ...

    def metadata(self) -> Iterable[tuple[str, Any]]:
        """Return the metadata that the client sent."""
        return ()

    @property
    def needs_load_report(self) -> bool:
        """True if the client asks for a load report with the response."""
        return False

    def headers(self) -> Iterable[tuple[str, str]]:
        """Return the metadata whose values are text."""
        return ((name, value) for name, value in self.metadata() if isinstance(value, str))

    def send(self, response: bytes) -> None:
        self.gone, self.submitted = True, None
        self.respond(response)

    def fail(self, error: Exception) -> None:
        if not self.gone:
            self.gone, self.submitted = True, None
            code, details = described(error, self.peer())
            self.refuse(code.value[0], details)

    def leave(self) -> None:
        """Cancel the request: the client has disconnected, or its deadline has passed."""
        submitted, self.gone, self.submitted = self.submitted, True, None
        if submitted:
            submitted.cancel()


class AwaitedInfer(InferReply):
    """The reply to a call of ModelInfer that a coroutine awaits."""
    __slots__ = ("_context", "response")

    def __init__(self, context: CallContext) -> None:
        super().__init__()
        self._context = context
        self.response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def respond(self, response: bytes) -> None:
        if not self.response.done():            # it may have been cancelled
            self.response.set_result(response)

    def refuse(self, code: int, details: str) -> None:
        if not self.response.done():
            self.response.set_exception(GrpcStatusError(code, details))

    def metadata(self) -> Iterable[tuple[str, Any]]:
        return self._context.metadata()

    @property
    def needs_load_report(self) -> bool:
        return requests_load_report(self._context.metadata())

    def peer(self) -> str:
        return self._context.peer()

    def disconnect(self) -> None:
        self._context.disconnect()
