"""POST of an inference: tensors as JSON, or as bytes behind the JSON (the binary tensor data extension).

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.request import Arrays
from infer_server.endpoints.front import Front
from infer_server.endpoints.http.compression import accepted, compressed
from infer_server.endpoints.http.connection import Exchange
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, parsed
from infer_server.endpoints.inflight import OpenCall
from infer_server.endpoints.shared_memory import Place
from infer_server.endpoints.tensors import Asked, Output, places, read, wanted
from infer_server.errors import InvalidRequestError, ServeError
from infer_server.protocol.codec import (
    InputTensor,
    declared_inputs,
    from_raw,
    narrowed,
    object_array,
    shaped,
)
from infer_server.protocol.parameters import Parameters
from infer_server.serving import Call, Served

_NO_JSON = ("FP16", "BF16")                         # datatypes
_JSON_BYTES = "inference-header-content-length"     # of the body; binary tensors follow


def infer(exchange: Exchange, model: str, version: str, front: Front) -> None:
    """Submits the inference of an exchange, which is answered when it is computed. Raises ServeErrors."""
    call = HttpCall(exchange.request, model, version, front, exchange.held)
    exchange.left = front.inferences.submit(call, HttpReply(exchange)).cancel


@dataclass(frozen=True, slots=True)
class HttpReply:
    """Answers an exchange."""
    exchange: Exchange

    @property
    def gone(self) -> bool:
        return self.exchange.gone

    def send(self, response: HttpResponse) -> None:
        self.exchange.respond(response)

    def fail(self, error: Exception) -> None:
        self.exchange.fail(error)


@dataclass(frozen=True)
class JsonTensor:
    """An input or a requested output, as the JSON has it."""
    name: str
    datatype: str = ""
    shape: Sequence[int] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None

    def asked(self) -> Asked:
        return Asked(self.name, self.parameters)


class HttpCall(Call):
    """An inference request; its response is an HttpResponse."""
    protocol = "HTTP"

    def __init__(self, request: HttpRequest, model: str, version: str, front: Front, held: OpenCall) -> None:
        """Raises InvalidRequestError: the body is no inference request."""
        self.model, self.version, self.received_ns = model, version, request.received_ns
        self._front, self._held = front, held
        head, self._binary = _split(request)
        self._head = _object(parsed(head), "the request")
        self.id = _typed(self._head, "id", str, "")
        self._parameters: dict[str, Any] = _typed(self._head, "parameters", dict, {})
        self._inputs = _tensors(self._head, "inputs")
        self._outputs = _tensors(self._head, "outputs")
        self._coding = accepted(request.headers)
        self._places: dict[int, Place] = {}

    def client(self) -> str:
        return self._held.client.peer() if self._held.client else ""

    def inputs(self) -> Sequence[InputTensor]:
        self._places = places((tensor.asked() for tensor in self._inputs), self._front.regions)
        return declared_inputs(self._inputs)

    def outputs(self) -> Iterable[str]:
        return (tensor.name for tensor in self._outputs)

    def parameters(self) -> Parameters:
        return self._parameters

    def expect(self, response_bytes: int) -> None:
        self._front.inflight.expect(self._held, response_bytes)

    def contents(self, tensors: Sequence[InputTensor]) -> dict[str, NDArray[Any]]:
        arrays, at = {}, 0
        placed = read(self._places, tensors, lambda count: self._front.inflight.hold(self._held, count))
        for i, (tensor, given) in enumerate(zip(tensors, self._inputs, strict=True)):
            if i in placed:
                arrays[tensor.name] = from_raw(tensor, placed[i])
                continue
            size = _typed(given.parameters, "binary_data_size", int, None)
            if size is None:
                arrays[tensor.name] = from_json(tensor, given.data)
                continue
            if given.data is not None:
                raise InvalidRequestError(f"{tensor}: 'data' and 'binary_data_size' must not both be given")
            if not 0 <= size <= len(self._binary) - at:
                raise InvalidRequestError(f"{tensor}: binary_data_size {size} exceeds the {len(self._binary) - at} "
                                          "bytes that are left of the body")
            arrays[tensor.name] = from_raw(tensor, self._binary[at:at + size])
            at += size
        if at != len(self._binary):
            raise InvalidRequestError(f"{len(self._binary) - at} bytes of the body belong to no input")
        return arrays

    def encoder(self, served: Served) -> Callable[[Arrays], HttpResponse | ServeError]:
        every = _typed(self._parameters, "binary_data_output", bool, False)
        in_bytes = {tensor.name: _typed(tensor.parameters, "binary_data", bool, every) for tensor in self._outputs}
        outputs = wanted(served, [tensor.asked() for tensor in self._outputs], self._front.regions)
        binary = tuple(in_bytes.get(spec.name, every) for spec in served.outputs)
        for output, raw in zip(outputs, binary, strict=True):
            if not raw and not output.place and output.datatype.name in _NO_JSON:
                raise InvalidRequestError(f"output '{output.spec.name}': {output.datatype.name} has no JSON form; ask "
                                          "for it with \"binary_data\": true")
        request_id, coding = self.id, self._coding

        def encode(computed: Arrays) -> HttpResponse | ServeError:
            try:
                return compressed(_response(served, outputs, binary, request_id, computed), coding)
            except ServeError as error:
                return error
        return encode


def _response(served: Served, outputs: Sequence[Output], binary: Sequence[bool], request_id: str,
              computed: Arrays) -> HttpResponse:
    described: list[dict[str, Any]] = []
    pieces: list[bytes | memoryview] = []
    for output, raw in zip(outputs, binary, strict=True):
        array, datatype = output.array(computed[output.spec.name]), output.datatype
        one: dict[str, Any] = {"name": output.spec.name, "datatype": datatype.name, "shape": array.shape}
        if output.place or raw:
            content = output.place_raw(array)
            if content is not None:     # of one in shared memory no more is said: clients take parameters for sizes
                pieces.append(bytes(content))       # the array is the engine's, for this batch only
                one["parameters"] = {"binary_data_size": len(pieces[-1])}
        else:
            one["data"] = to_json(array, datatype.name)
        described.append(one)
    body = {"model_name": served.model, "model_version": str(served.version), "outputs": described}
    text = json.dumps({"id": request_id, **body} if request_id else body).encode()
    if not pieces:
        return HttpResponse((text,))
    return HttpResponse((text, *pieces), content_type="application/octet-stream",
                        headers={"Inference-Header-Content-Length": str(len(text))})


# ---- tensors as JSON
def from_json(tensor: InputTensor, data: Any) -> NDArray[Any]:
    """Numbers, truths or strings, nested or in one list, row-major. Raises InvalidRequestError."""
    datatype = tensor.datatype
    if datatype.name in _NO_JSON:
        raise InvalidRequestError(f"{tensor}: {datatype.name} has no JSON form; send it as binary data")
    if not isinstance(data, list):
        raise InvalidRequestError(f"{tensor}: 'data' is missing, or no list")
    values = _flat(data)
    count = int(np.prod(tensor.shape, dtype=np.int64)) if tensor.shape else 1
    if len(values) != count:
        raise InvalidRequestError(f"{tensor}: expected {count} values in 'data', got {len(values)}")
    kinds: dict[str, set[type]] = {"b": {bool}, "f": {float, int}, "O": {str}}
    if others := set(map(type, values)) - kinds.get(datatype.array.kind, {int}):
        raise InvalidRequestError(f"{tensor}: a {others.pop().__name__} in 'data' is no {datatype.name}")
    if datatype.name == "BYTES":
        return shaped(tensor, object_array([value.encode() for value in values]))
    try:
        if datatype.array.kind in "iu":
            return narrowed(tensor, np.array(values, np.uint64 if datatype.name == "UINT64" else np.int64))
        return shaped(tensor, np.array(values, datatype.array))
    except OverflowError as error:
        raise InvalidRequestError(f"{tensor}: a value is outside of what {datatype.name} holds") from error


def to_json(array: NDArray[Any], datatype: str) -> list[Any]:
    """The elements in one list."""
    if datatype == "BYTES":
        return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in array.flat]
    values: list[Any] = array.reshape(-1).tolist()
    return values


def _flat(data: list[Any]) -> list[Any]:
    """A nested list as one; no recursion, however deep."""
    while any(isinstance(value, list) for value in data):
        data = [inner for value in data for inner in (value if isinstance(value, list) else (value,))]
    return data


# ---- the message
def _split(request: HttpRequest) -> tuple[bytes, memoryview]:
    """The JSON of a body, and what follows it."""
    length = request.headers.get(_JSON_BYTES)
    if length is None:
        return request.body, memoryview(b"")
    if not length.isdecimal() or int(length) > len(request.body):
        raise InvalidRequestError(f"Inference-Header-Content-Length '{length}' is not within the body of "
                                  f"{len(request.body)} bytes")
    return request.body[:int(length)], memoryview(request.body)[int(length):]


def _tensors(head: Mapping[str, Any], key: str) -> list[JsonTensor]:
    tensors = []
    for each in _typed(head, key, list, []):
        tensor = _object(each, f"an element of '{key}'")
        name = _typed(tensor, "name", str, "")
        shape = _typed(tensor, "shape", list, [])
        if not name:
            raise InvalidRequestError(f"an element of '{key}' has no name")
        if any(type(extent) is not int for extent in shape):
            raise InvalidRequestError(f"'{name}': shape {shape} is no list of integers")
        tensors.append(JsonTensor(name, _typed(tensor, "datatype", str, ""), shape,
                                  _typed(tensor, "parameters", dict, {}), tensor.get("data")))
    return tensors


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} is no JSON object")
    return value


def _typed(head: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """A member of a JSON object. Raises InvalidRequestError for one of another kind."""
    value = head.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        raise InvalidRequestError(f"'{key}': expected {kind.__name__}, got {type(value).__name__}")
    return value
