"""ModelInfer without coroutines: a call is an object that is told its message, and that is answered or fails once."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import Any

from infer_server.endpoints.front import Front
from infer_server.endpoints.grpc.errors import described
from infer_server.endpoints.grpc.infer import GrpcCall
from infer_server.endpoints.inflight import OpenCall
from infer_server.endpoints.restrictions import OF_CALL, Restrictions
from infer_server.protocol.wire import split_request
from infer_server.serving import Submitted

_CATEGORY = OF_CALL["ModelInfer"]


class InferReply(ABC):
    """The reply to a call of ModelInfer (batching.request.Reply), and its client (inflight.Client).

    Belongs to the event loop.
    """
    __slots__ = ("held", "submitted", "gone")

    def __init__(self) -> None:
        self.held: OpenCall | None = None           # counts the bytes of the call
        self.submitted: Submitted | None = None
        self.gone = False                           # it has ended: answered, failed, or left by its client

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
        """Cancel the request: the client has gone, or its deadline has passed."""
        submitted, self.gone, self.submitted = self.submitted, True, None
        if submitted:
            submitted.cancel()


class InferCalls:
    """Takes calls of ModelInfer. Belongs to the event loop."""

    def __init__(self, front: Front, restrictions: Restrictions) -> None:
        self.front, self._restrictions = front, restrictions
        self._is_restricted = _CATEGORY in restrictions.secrets

    def take(self, reply: InferReply, data: bytes, received_ns: int, remaining_secs: float | None) -> None:
        """Submit a serialised ModelInferRequest; `reply` is told of whatever comes of it.

        reply.held counts the bytes of `data` if they arrived in pieces; else they are counted here.
        remaining_secs: seconds until the client's deadline; None if it has none.
        """
        try:
            if self._is_restricted:
                self._restrictions.check(_CATEGORY, dict(reply.metadata()).get)
            held = reply.held
            if held is None:
                held = reply.held = self.front.inflight.begin(reply, len(data))
            call = GrpcCall(split_request(data), received_ns, remaining_secs, self.front, held)
            if self.front.on_demand:
                self.front.on_demand.when_loaded(call.model, partial(self._submit, call, reply), reply.fail)
            else:
                reply.submitted = self.front.inferences.submit(call, reply)
        except Exception as error:
            reply.fail(error)

    def _submit(self, call: GrpcCall, reply: InferReply) -> None:
        if not reply.gone:
            reply.submitted = self.front.inferences.submit(call, reply)
