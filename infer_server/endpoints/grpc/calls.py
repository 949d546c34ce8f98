"""Calls of ModelInfer that a transport hands over as plain values, each by its number: no coroutine, no future."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from infer_server.endpoints.grpc.errors import described
from infer_server.endpoints.grpc.infer import GrpcCall, GrpcFront
from infer_server.endpoints.inflight import OpenCall
from infer_server.endpoints.restrictions import OF_CALL, Restrictions
from infer_server.protocol.wire import split_request
from infer_server.serving import Submitted

_CATEGORY = OF_CALL["ModelInfer"]
Metadata = Sequence[tuple[str, Any]]


class Transport(Protocol):
    """What calls come by, and their answers go by."""

    def respond(self, number: int, response: bytes, peer: str) -> None: ...

    def fail(self, number: int, code: int, details: str) -> None: ...


class InferCalls:
    """Belongs to the event loop."""

    def __init__(self, front: GrpcFront, restrictions: Restrictions, transport: Transport) -> None:
        self.front, self._restrictions, self.transport = front, restrictions, transport
        self._answers: dict[int, Answer] = {}               # that are awaited, by the numbers of their calls

    def take(self, number: int, data: bytes, metadata: Metadata, peer: str, remaining_secs: float | None,
             received_ns: int) -> None:
        """Submits a serialised ModelInferRequest. remaining_secs: see GrpcCall."""
        answer = self._answers[number] = self._answer(number, peer)
        try:
            if _CATEGORY in self._restrictions.secrets:
                self._restrictions.check(_CATEGORY, dict(metadata).get)
            held = answer.held = self.front.inflight.begin(answer, len(data))
            call = _Call(split_request(data), received_ns, remaining_secs, self.front, held)
            call.metadata, call.early = metadata, answer.early
            if self.front.on_demand:
                self.front.on_demand.when_loaded(call.model, partial(self._submit, call, answer), answer.fail)
            else:
                self._submit(call, answer)
        except Exception as error:
            answer.fail(error)

    def leave(self, number: int) -> None:
        """The client of a call has gone, or its deadline has passed."""
        if answer := self._answers.get(number):
            answer.leave()

    def forget(self, answer: Answer) -> None:
        """To be called when an answer is given, or nobody waits for it any more."""
        del self._answers[answer.number]
        if answer.held:
            self.front.inflight.end(answer.held)

    def _answer(self, number: int, peer: str) -> Answer:
        return Answer(self, number, peer)

    def _submit(self, call: GrpcCall, answer: Answer) -> None:
        if not answer.gone:
            answer.submitted = self.front.inferences.submit(call, answer)


class _Call(GrpcCall):
    metadata: Metadata = ()

    def headers(self) -> Iterable[tuple[str, str]]:
        return ((name, value) for name, value in self.metadata if isinstance(value, str))


class Answer:
    """The reply to a call, and its client."""
    __slots__ = ("_calls", "number", "_peer", "held", "submitted", "gone", "_sent")

    def __init__(self, calls: InferCalls, number: int, peer: str) -> None:
        self._calls, self.number, self._peer = calls, number, peer
        self.held: OpenCall | None = None
        self.submitted: Submitted | None = None
        self.gone = self._sent = False

    def early(self, response: bytes) -> None:
        """Responds on an instance's thread, which spares the client the way over the event loop. If the loop comes
        first, both respond, and the transport takes one."""
        if not self.gone:
            self._sent = True
            self._calls.transport.respond(self.number, response, self._peer)

    def send(self, response: bytes) -> None:
        self._end()
        if not self._sent:
            self._calls.transport.respond(self.number, response, self._peer)

    def fail(self, error: Exception) -> None:
        if not self.gone:
            self._end()
            code, details = described(error, self._peer)
            self._calls.transport.fail(self.number, code.value[0], details)

    def leave(self) -> None:
        """Its client has gone, or its deadline has passed."""
        submitted = self.submitted
        self._end()
        if submitted:
            submitted.cancel()

    def _end(self) -> None:
        self.gone, self.submitted = True, None
        self._calls.forget(self)

    # ---- inflight.Client
    def peer(self) -> str:
        return self._peer

    def disconnect(self) -> None:
        self._calls.front.disconnect(self._peer)
