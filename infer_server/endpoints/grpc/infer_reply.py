"""Reply to a ModelInfer call that is served without a coroutine."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from infer_server.endpoints.grpc.errors import described
from infer_server.endpoints.inflight import OpenCall

if TYPE_CHECKING:
    from infer_server.serving import Submitted


class InferReply(ABC):
    """The reply to a call of ModelInfer (batching.request.Reply), and its client (inflight.Client).

    Belongs to the event loop.
    """
    __slots__ = ("held", "submitted", "gone")

    def __init__(self) -> None:
        self.held: OpenCall | None = None           # counts the bytes of the call
        self.submitted: Submitted | None = None
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
