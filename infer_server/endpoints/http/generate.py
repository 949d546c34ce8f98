"""Triton's generate extension: tensors as plain JSON members, answered in one piece or as server-sent events.

    {"text_input": "Hello", "max_tokens": 5}  ->  {"model_name": "m", "model_version": "1", "text_output": "..."}

A member that is not an input of the model is a parameter of the request. Parameters of the response are members, too.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.request import Arrays, parameters_of
from infer_server.config.config import TensorSpec
from infer_server.endpoints.http.exchange import Exchange
from infer_server.endpoints.http.infer import LITTLE_JSON_BYTES, HttpInferenceCall, HttpReply
from infer_server.endpoints.http.messages import HttpResponse, error_text, json_text, member
from infer_server.endpoints.services import InferenceServices
from infer_server.errors import ExecutionError, InvalidRequestError
from infer_server.protocol.codec import InputTensor, shaped
from infer_server.protocol.json_documents import LARGE_BYTES, read_members
from infer_server.protocol.json_tensors import MANY, NO_JSON, from_json, json_pieces, read_array, to_json
from infer_server.protocol.json_values import JsonArray, Steps, flat
from infer_server.protocol.parameters import Parameters
from infer_server.repository.model import Model
from infer_server.serving import Served

_EVENTS = "text/event-stream; charset=utf-8"
_PARAMETERS = "parameters"              # optional member that holds further inputs and parameters


def generate(exchange: Exchange, model: Model, version: str, services: InferenceServices, streamed: bool) -> None:
    """Submit the generate request of an exchange. Raises ServeErrors.

    streamed: send an event for every response; otherwise the model must give exactly one response.
    """
    if len(exchange.request.body) > LARGE_BYTES:
        exchange.answer_later(_generate_large(exchange, model, version, services, streamed))
    else:
        _submit(exchange, GenerateCall(exchange, exchange.request.json(), model, version, services), services, streamed)


async def _generate_large(exchange: Exchange, model: Model, version: str, services: InferenceServices,
                          streamed: bool) -> None:
    """Submit a generate request whose body is parsed in steps."""
    steps = exchange.while_present(_read(exchange, model, services))
    call = GenerateCall(exchange, await services.inflight.steps.run(steps), model, version, services)
    if not exchange.gone:
        exchange.request = exchange.request._replace(body=b"")
        _submit(exchange, call, services, streamed)


def _read(exchange: Exchange, model: Model, services: InferenceServices) -> Steps[dict[str, Any]]:
    """Read a large body; long arrays of inputs become ndarrays."""
    hold = partial(services.inflight.hold, exchange.open_call)
    specs = {spec.name: spec for spec in model.config.inputs}
    body = yield from read_members(exchange.request.body, len(exchange.request.body), hold)
    for members in (body, member(body, _PARAMETERS, dict, {})):
        for name, value in members.items():
            spec = specs.get(name)
            if isinstance(value, JsonArray):
                members[name] = [] if spec is None else (
                    yield from read_array(spec.datatype, name, f"input '{name}'", value, hold))
    return body


def _submit(exchange: Exchange, call: GenerateCall, services: InferenceServices, streamed: bool) -> None:
    reply = EventsReply(exchange) if streamed else OneReply(exchange)
    exchange.when_left(services.inferences.submit(call, reply).cancel)


class GenerateCall(HttpInferenceCall):
    """Generate request; its response is a JSON object as text."""

    def __init__(self, exchange: Exchange, body: Any, model: Model, version: str, services: InferenceServices) -> None:
        """Read the request from the parsed body of an exchange. Raises InvalidRequestError if it is malformed."""
        super().__init__(exchange.request, model.name, version, services, exchange.open_call)
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

    def inputs(self) -> Sequence[InputTensor]:
        return self._inputs

    def outputs(self) -> Iterable[str]:
        return ()

    def parameters(self) -> Parameters:
        return self._parameters

    def contents(self, tensors: Sequence[InputTensor], devices: Set[int | None]) -> Mapping[str, NDArray[Any]]:
        return {tensor.name: shaped(tensor, values) if isinstance(values := self._values[tensor.name], np.ndarray)
                else from_json(tensor, values) for tensor in tensors}

    def encoder(self, served: Served) -> Callable[[Arrays], bytes]:
        if specs := [spec for spec in served.outputs if spec.datatype.name in NO_JSON]:
            raise InvalidRequestError(f"sending {specs[0].datatype.name} data via JSON is not supported. Please use "
                                      f"the binary data format for output '{specs[0].name}': ask for it by an "
                                      "inference")
        about = {"id": self.id} if self.id else {}
        about |= {"model_name": served.model, "model_version": str(served.version)}

        def encode(computed: Arrays) -> bytes:
            short: dict[str, Any] = {}
            long: list[bytes] = []
            for spec in served.outputs:
                if spec.name in computed:
                    array = computed[spec.name]
                    if array.size > MANY:
                        long += (b",", json_text(spec.name), b":", *json_pieces(array, spec.datatype.name, "replace"))
                    else:
                        values = to_json(array, spec.datatype.name, "replace")
                        short[spec.name] = values[0] if len(values) == 1 else values
            text = json_text({**parameters_of(computed), **about, **short})
            return b"".join((text[:-1], *long, b"}"))
        self.lengthy = not 0 < self._answer_bytes <= LITTLE_JSON_BYTES
        return encode


class OneReply(HttpReply):
    """Reply to a generate call: the model must give exactly one response."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._parts: list[bytes] = []

    def send(self, response: bytes) -> None:
        self._exchange.respond(HttpResponse((response,)))

    def part(self, response: bytes, is_last: bool = False) -> None:
        self._parts = [*self._parts[:1], response]      # end() only needs to know that there are more than one

    def end(self) -> None:
        if len(self._parts) != 1:
            raise ExecutionError("generate expects model to produce exactly 1 response, use generate_stream for a "
                                 "model that may produce another number of them")
        self.send(self._parts[0])


class EventsReply(HttpReply):
    """Reply to a generate_stream call: an event for each response.

    An error is an HTTP status if no event was sent yet, otherwise the last event.
    """

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
            self.send(error_text(self._exchange.message_of(error)))
        else:
            super().fail(error)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._exchange.begin(_EVENTS)


def _values(value: Any) -> list[Any] | NDArray[Any]:
    return value if isinstance(value, np.ndarray) else flat(value) if isinstance(value, list) else [value]


def _shape(spec: TensorSpec, batched: bool, count: int) -> tuple[int, ...]:
    """Return the shape of a tensor with `count` elements: open extents are 1, but the last absorbs the rest."""
    shape = [extent if extent != -1 else 1 for extent in spec.full_shape(batched)]
    fixed = math.prod(shape)
    if count != fixed:
        last = max((at for at, extent in enumerate(spec.full_shape(batched)) if extent == -1), default=None)
        if last is None or count % fixed:
            raise InvalidRequestError(f"'{spec.name}': {count} values do not fill {spec.describe(batched)}")
        shape[last] = count // fixed
    return tuple(shape)
