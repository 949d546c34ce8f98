"""POST of a generation: tensors by their names as plain JSON, answered in one piece or as server-sent events.

    {"text_input": "Hello", "max_tokens": 5}  ->  {"model_name": "m", "model_version": "1", "text_output": "..."}

A member that is no input of the model is a parameter of the request; of the answer, one of the response.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from numpy.typing import NDArray

from infer_server.batching.request import Arrays, parameters_of
from infer_server.config.config import TensorSpec
from infer_server.endpoints.front import Front
from infer_server.endpoints.http.connection import Exchange
from infer_server.endpoints.http.infer import HttpReply
from infer_server.endpoints.http.messages import HttpResponse, error_text, json_text, member
from infer_server.errors import ExecutionError, InvalidRequestError
from infer_server.protocol.codec import InputTensor
from infer_server.protocol.json_tensors import NO_JSON, flat, from_json, to_json
from infer_server.protocol.parameters import Parameters
from infer_server.repository.model import Model
from infer_server.serving import Call, Served

_EVENTS = "text/event-stream; charset=utf-8"
_PARAMETERS = "parameters"              # a member whose members are inputs and parameters like those beside it


def generate(exchange: Exchange, model: Model, version: str, front: Front, streamed: bool) -> None:
    """Submits the generation of an exchange. streamed: every response is an event; else there must be one of them.

    Raises ServeErrors.
    """
    call = GenerateCall(exchange, model, version, front)
    reply = EventsReply(exchange) if streamed else OneReply(exchange)
    exchange.when_left(front.inferences.submit(call, reply).cancel)


class GenerateCall(Call):
    """A generation; its response is a JSON object as text."""
    protocol = "HTTP"

    def __init__(self, exchange: Exchange, model: Model, version: str, front: Front) -> None:
        """Raises InvalidRequestError: the body is no such request."""
        request = exchange.request
        self.model, self.version, self.received_ns = model.name, version, request.received_ns
        self._front, self._held, self._headers = front, exchange.held, request.headers
        body = request.json()
        self.id = member(body, "id", str, "")
        members = {**body, **member(body, _PARAMETERS, dict, {})}
        specs = {spec.name: spec for spec in model.config.inputs}
        self._values = {name: _values(value) for name, value in members.items() if name in specs}
        self._inputs = [InputTensor(name, specs[name].datatype,
                                    _shape(specs[name], model.config.batched, len(values)), model.name)
                        for name, values in self._values.items()]
        self._parameters = {name: value for name, value in members.items()
                            if name not in specs and name not in ("id", _PARAMETERS) and value is not None}
        for name, value in self._parameters.items():
            if isinstance(value, list | dict):
                raise InvalidRequestError(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or "
                                          f"'string', for it is no input of model '{model.name}', which has "
                                          f"{', '.join(specs)}")

    def client(self) -> str:
        return self._held.client.peer() if self._held.client else ""

    def headers(self) -> Iterable[tuple[str, str]]:
        return self._headers.items()

    def inputs(self) -> Sequence[InputTensor]:
        return self._inputs

    def outputs(self) -> Iterable[str]:
        return ()

    def parameters(self) -> Parameters:
        return self._parameters

    def expect(self, response_bytes: int, decoded_bytes: int) -> None:
        self._front.inflight.expect(self._held, response_bytes, decoded_bytes)

    def contents(self, tensors: Sequence[InputTensor], devices: Set[int | None]) -> Mapping[str, NDArray[Any]]:
        return {tensor.name: from_json(tensor, self._values[tensor.name]) for tensor in tensors}

    def encoder(self, served: Served) -> Callable[[Arrays], bytes]:
        if specs := [spec for spec in served.outputs if spec.datatype.name in NO_JSON]:
            raise InvalidRequestError(f"sending {specs[0].datatype.name} data via JSON is not supported. Please use "
                                      f"the binary data format for output '{specs[0].name}': ask for it by an "
                                      "inference")
        about = {"id": self.id} if self.id else {}
        about |= {"model_name": served.model, "model_version": str(served.version)}

        def encode(computed: Arrays) -> bytes:
            values = {spec.name: to_json(computed[spec.name], spec.datatype.name, "replace") for spec in served.outputs
                      if spec.name in computed}
            plain = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
            return json_text({**parameters_of(computed), **about, **plain})
        return encode


class OneReply(HttpReply):
    """The answer in one piece, of a model that gives one response."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._parts: list[bytes] = []

    def send(self, response: bytes) -> None:
        self._exchange.respond(HttpResponse((response,)))

    def part(self, response: bytes, is_last: bool = False) -> None:
        self._parts = [*self._parts[:1], response]      # two are as wrong as more

    def end(self) -> None:
        if len(self._parts) != 1:
            raise ExecutionError("generate expects model to produce exactly 1 response, use generate_stream for a "
                                 "model that may produce another number of them")
        self.send(self._parts[0])


class EventsReply(HttpReply):
    """An event for each response. An error is a status if it is the first, and else the last event."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._begun = False

    def send(self, response: bytes) -> None:
        self.part(response)
        self.end()

    def part(self, response: bytes, is_last: bool = False) -> None:
        self._begin()
        self._exchange.part(b"data: " + response + b"\n\n")

    def end(self) -> None:
        self._begin()
        self._exchange.end()

    def fail(self, error: Exception) -> None:
        if self._begun:
            self.send(error_text(self._exchange.said(error)))
        else:
            super().fail(error)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._exchange.begin(_EVENTS)


def _values(value: Any) -> list[Any]:
    return flat(value) if isinstance(value, list) else [value]


def _shape(spec: TensorSpec, batched: bool, count: int) -> tuple[int, ...]:
    """Of a tensor with so many elements: the last open extent has all that the others leave, which are 1."""
    shape = [extent if extent != -1 else 1 for extent in spec.full_shape(batched)]
    fixed = math.prod(shape)
    if count != fixed:
        last = max((at for at, extent in enumerate(spec.full_shape(batched)) if extent == -1), default=None)
        if last is None or count % fixed:
            raise InvalidRequestError(f"'{spec.name}': {count} values do not fill {spec.describe(batched)}")
        shape[last] = count // fixed
    return tuple(shape)
