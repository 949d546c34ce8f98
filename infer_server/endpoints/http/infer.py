"""POST of an inference: tensors as JSON, or as bytes behind the JSON (the binary tensor data extension).

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""
from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from infer_server.batching.request import Arrays, Outputs, Reply, parameters_of
from infer_server.config.config import ModelConfig
from infer_server.endpoints.front import Front
from infer_server.endpoints.http.compression import accepted, compressed
from infer_server.endpoints.http.connection import Exchange
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, json_text, parsed
from infer_server.endpoints.inflight import OpenCall
from infer_server.endpoints.shared_memory import Place, Regions
from infer_server.endpoints.tensors import Asked, Output, if_whole, read, rooms, wanted
from infer_server.errors import InvalidRequestError, ServeError
from infer_server.gpu_tensors import GpuRoom
from infer_server.protocol.codec import (
    InputTensor,
    declared_inputs,
    encode_raw,
    from_raw,
)
from infer_server.protocol.json_tensors import NO_JSON, from_json, to_json
from infer_server.protocol.parameters import Parameters, Reference, digits, references_of
from infer_server.protocol.wire import KEPT_BYTES, KEPT_FORMS
from infer_server.repository.model import Model
from infer_server.serving import Call, Served

_JSON_BYTES = "inference-header-content-length"     # of the body; binary tensors follow


def infer(exchange: Exchange, model: str, version: str, front: Front, find: Callable[[str, str], Model]) -> None:
    """Submits the inference of an exchange, which is answered when it is computed. Raises ServeErrors.

    find: the model of a name and a version, for a body whose tensor nothing but the model describes.
    """
    request = exchange.request
    said, binary = (_described(find(model, version).config, request.body) if request.headers.get(_JSON_BYTES) == "0"
                    else _split(request))
    call = HttpCall(request, said, binary, model, version, front, exchange.held)
    exchange.when_left(front.inferences.submit(call, _InferReply(exchange)).cancel)


class HttpReply(Reply):
    """What replies to an exchange have in common."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def gone(self) -> bool:
        return self._exchange.gone

    def fail(self, error: Exception) -> None:
        self._exchange.fail(error)


class _InferReply(HttpReply):
    def send(self, response: HttpResponse) -> None:
        self._exchange.respond(response)


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


@dataclass(eq=False)
class Form:
    """What the JSON of a request says. Requests of the same JSON, followed by their tensors, have the same one."""
    head: Mapping[str, Any]
    is_kept: bool = False                       # it may come again

    def __post_init__(self) -> None:
        """Raises InvalidRequestError: it is no inference request."""
        self.id: str = _typed(self.head, "id", str, "")
        self.parameters: dict[str, Any] = _typed(self.head, "parameters", dict, {})
        self.inputs = _tensors(self.head, "inputs")
        self.outputs = _tensors(self.head, "outputs")
        self.encoder: Encoder | None = None     # of the last request, if another may have the same

    @functools.cached_property
    def sizes(self) -> list[int | None]:
        """Of each input in the bytes behind the JSON; None: it is not there. Raises InvalidRequestError."""
        return [_typed(tensor.parameters, "binary_data_size", int, None) for tensor in self.inputs]

    @functools.cached_property
    def references(self) -> Mapping[int, Reference]:
        """The inputs that lie in shared memory, by their positions. Raises InvalidRequestError."""
        return references_of(tensor.asked() for tensor in self.inputs)

    def encoder_of(self, served: Served, regions: Regions) -> Encoder:
        """Raises ServeErrors."""
        if self.encoder is None or self.encoder.served is not served:
            encoder = self._encoder(served, regions)
            if encoder.has_places:      # its region may be another the next time
                return encoder
            self.encoder = encoder
        return self.encoder

    def _encoder(self, served: Served, regions: Regions) -> Encoder:
        every = _typed(self.parameters, "binary_data_output", bool, False)
        in_bytes = {tensor.name: _typed(tensor.parameters, "binary_data", bool, every) for tensor in self.outputs}
        outputs = wanted(served, [tensor.asked() for tensor in self.outputs], regions)
        binary = tuple(in_bytes.get(spec.name, every) for spec in served.outputs)
        for output, raw in zip(outputs, binary, strict=True):
            if not raw and not output.place and output.datatype.name in NO_JSON:
                raise InvalidRequestError(f"sending {output.datatype.name} data via JSON is not supported. Please use "
                                          f"the binary data format for output '{output.spec.name}': ask for it with "
                                          "\"binary_data\": true")
        return Encoder(served, outputs, binary, self.id)


class HttpCall(Call):
    """An inference request; its response is an HttpResponse."""
    protocol = "HTTP"
    _lent: Sequence[Place] = ()         # where inputs are read while it is executed; known after contents()

    def __init__(self, request: HttpRequest, said: Form, binary: memoryview, model: str, version: str, front: Front,
                 held: OpenCall) -> None:
        """said, binary: what the body consists of."""
        self.model, self.version, self.received_ns = model, version, request.received_ns
        self._front, self._held, self._headers = front, held, request.headers
        self._said, self._binary = said, binary
        self.id = self._said.id
        self.form = self._said if self._said.is_kept else None
        self._coding = accepted(request.headers) if "accept-encoding" in request.headers else ""

    def client(self) -> str:
        return self._held.client.peer() if self._held.client else ""

    def headers(self) -> Iterable[tuple[str, str]]:
        return self._headers.items()

    def inputs(self) -> Sequence[InputTensor]:
        return declared_inputs(self._said.inputs, self.model)

    def outputs(self) -> Iterable[str]:
        return (tensor.name for tensor in self._said.outputs)

    def parameters(self) -> Parameters:
        return self._said.parameters

    def expect(self, response_bytes: int, decoded_bytes: int) -> None:
        self._front.inflight.expect(self._held, response_bytes, decoded_bytes)

    def contents(self, tensors: Sequence[InputTensor], devices: Set[int | None]) -> Mapping[str, Any]:
        arrays: dict[str, Any] = {}
        at = 0
        placed: Mapping[int, Any] = {}
        if references := self._said.references:
            placed, self._lent = read(references, tensors, self._front.regions,
                                      functools.partial(self._front.inflight.hold, self._held), devices)
        for i, (tensor, given, size) in enumerate(zip(tensors, self._said.inputs, self._said.sizes, strict=True)):
            if i in placed:
                arrays[tensor.name] = from_raw(tensor, raw) if isinstance(raw := placed[i], memoryview) else raw
                continue
            if size is None:
                arrays[tensor.name] = from_json(tensor, given.data)
                continue
            if given.data is not None:
                raise InvalidRequestError(f"{tensor}: 'data' and 'binary_data_size' must not both be given")
            if size < 0:
                raise InvalidRequestError(f"{tensor}: a binary_data_size of {size}")
            if (left := len(self._binary) - at) < size:
                raise InvalidRequestError(f"unexpected size for input '{tensor.name}', expecting {size - left} "
                                          f"additional bytes for model '{self.model}': binary_data_size {size} exceeds "
                                          f"the {left} bytes that are left of the body")
            arrays[tensor.name] = from_raw(tensor, self._binary[at:at + size])
            at += size
        if at != len(self._binary):
            raise InvalidRequestError(f"unexpected additional input data for model '{self.model}': "
                                      f"{len(self._binary) - at} bytes of the body belong to no input")
        return arrays

    def encoder(self, served: Served) -> Callable[[Arrays], HttpResponse | ServeError]:
        encode = self._said.encoder_of(served, self._front.regions)
        self.lengthy, self.rooms = bool(self._coding) or encode.has_places, encode.rooms
        return if_whole(self._lent, functools.partial(_compressed, encode, self._coding)
                        if self._coding else encode)


def _compressed(encode: Encoder, coding: str, computed: Arrays) -> HttpResponse | ServeError:
    response = encode(computed)
    return compressed(response, coding) if isinstance(response, HttpResponse) else response


@dataclass(frozen=True, eq=False)
class Encoder:
    """Makes responses of computed outputs, on an instance's thread."""
    served: Served
    outputs: Sequence[Output]
    binary: Sequence[bool]              # of each of them: as bytes behind the JSON
    request_id: str

    @functools.cached_property
    def has_places(self) -> bool:
        """Whether outputs go into shared memory."""
        return any(output.place for output in self.outputs)

    @functools.cached_property
    def rooms(self) -> Mapping[str, GpuRoom]:
        return rooms(self.outputs) if self.has_places else {}

    @functools.cached_property
    def _plain(self) -> frozenset[str]:
        """The names of the outputs, if all that is said of them follows of their shapes: arrays behind the JSON."""
        plain = all(self.binary) and not self.has_places and not any(
            output.datatype.name == "BYTES" for output in self.outputs)
        return frozenset(output.spec.name for output in self.outputs) if plain else frozenset()

    def __call__(self, computed: Arrays) -> HttpResponse | ServeError:
        if self._plain and self._plain <= computed.keys() and not isinstance(computed, Outputs):
            arrays = [computed[output.spec.name] for output in self.outputs]
            head = _plain_head(self, tuple([array.shape for array in arrays]))
            contents = [bytes(encode_raw(array, output.datatype))   # arrays are the engine's, for this batch only
                        for array, output in zip(arrays, self.outputs, strict=True)]
            return HttpResponse((*head.body, *contents), head.status, head.content_type, head.headers)
        described: list[dict[str, Any]] = []
        pieces: list[bytes | memoryview] = []
        try:
            for output, raw in zip(self.outputs, self.binary, strict=True):
                if output.spec.name in computed:
                    described.append(self._describe(output, raw, output.array(computed[output.spec.name]), pieces))
        except ServeError as error:
            return error
        head = self.head(described, parameters_of(computed), is_binary=bool(pieces))
        return head._replace(body=(*head.body, *pieces))

    def head(self, described: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any],
             is_binary: bool) -> HttpResponse:
        """A response with its JSON alone; is_binary: arrays follow it."""
        body: dict[str, Any] = {"id": self.request_id} if self.request_id else {}
        body |= {"model_name": self.served.model, "model_version": str(self.served.version)}
        if parameters:
            body["parameters"] = dict(parameters)
        body["outputs"] = described
        text = json_text(body)
        if not is_binary:
            return HttpResponse((text,))
        return HttpResponse((text,), content_type="application/octet-stream",
                            headers={"Inference-Header-Content-Length": str(len(text))})

    def _describe(self, output: Output, raw: bool, array: NDArray[Any],
                  pieces: list[bytes | memoryview]) -> dict[str, Any]:
        """What the JSON says of an output; pieces: takes its bytes, if they follow the JSON."""
        one: dict[str, Any] = {"name": output.spec.name, "datatype": output.datatype.name, "shape": array.shape}
        if output.place or raw:
            content = output.place_raw(array)
            if content is not None:     # of one in shared memory no more is said: clients take parameters for sizes
                pieces.append(bytes(content))       # the array is the engine's, for this batch only
                one["parameters"] = {"binary_data_size": len(pieces[-1])}
        else:
            one["data"] = to_json(array, output.datatype.name)
        return one


@functools.lru_cache(KEPT_FORMS)
def _plain_head(encoder: Encoder, shapes: Sequence[tuple[int, ...]]) -> HttpResponse:
    """What comes before arrays of these shapes."""
    return encoder.head([
        {"name": output.spec.name, "datatype": output.datatype.name, "shape": shape,
         "parameters": {"binary_data_size": math.prod(shape) * output.datatype.array.itemsize}}
        for output, shape in zip(encoder.outputs, shapes, strict=True)], {}, is_binary=True)


# ---- the message
def _split(request: HttpRequest) -> tuple[Form, memoryview]:
    """The JSON of a body, and what follows it. Raises InvalidRequestError."""
    length = request.headers.get(_JSON_BYTES)
    if length is None:
        return Form(_object(parsed(request.body), "the request")), memoryview(b"")
    size = digits(length)
    if size is None:
        raise InvalidRequestError(f"Unable to parse Inference-Header-Content-Length, got: {length}, which is no number "
                                  "of bytes")
    if size > len(request.body):
        raise InvalidRequestError(f"inference header size should be in range (0, {len(request.body)}), got: {length}, "
                                  "which is more than the body has (Inference-Header-Content-Length)")
    head = bytes(request.body[:size])
    return (_kept_form(head) if size <= KEPT_BYTES else Form(_object(parsed(head), "the request")),
            memoryview(request.body)[size:])


@functools.lru_cache(KEPT_FORMS)
def _kept_form(head: bytes) -> Form:
    return Form(_object(parsed(head), "the request"), is_kept=True)


def _described(config: ModelConfig, body: bytes | bytearray) -> tuple[Form, memoryview]:
    """What a request would say whose body is the model's one input, of one item, and nothing else; and its bytes. The
    outputs come as bytes, too. Raises InvalidRequestError: the model does not tell the shape."""
    if len(config.inputs) != 1:
        raise InvalidRequestError("Raw request must only have 1 input (found 1) to be deduced but got "
                                  f"{len(config.inputs)} inputs in '{config.name}' model configuration; say in JSON "
                                  "which bytes are whose, and how long that is in Inference-Header-Content-Length")
    (spec,), dims, contents = config.inputs, config.inputs[0].dims, memoryview(body)
    if spec.datatype.name == "BYTES":
        if dims != (1,):
            raise InvalidRequestError(f"For BYTE datatype raw input '{spec.name}', the model must have input shape "
                                      f"[1], and not {list(dims)}")
        contents = memoryview(struct.pack("<I", len(body)) + body)
    elif dims.count(-1) > 1:
        raise InvalidRequestError(f"The shape of the raw input '{spec.name}' can not be deduced because there are more "
                                  f"than one variable-sized dimension in {list(dims)}")
    known = math.prod(extent for extent in dims if extent != -1) * spec.datatype.array.itemsize
    shape = [len(body) // known if extent == -1 and known else extent for extent in dims]
    return Form({"inputs": [{"name": spec.name, "datatype": spec.datatype.name, "shape": [1] * config.batched + shape,
                             "parameters": {"binary_data_size": len(contents)}}],
                 "parameters": {"binary_data_output": True}}), contents


def _tensors(head: Mapping[str, Any], key: str) -> list[JsonTensor]:
    tensors = []
    for each in _typed(head, key, list, []):
        tensor = _object(each, f"an element of '{key}'")
        name = _typed(tensor, "name", str, "")
        shape = _typed(tensor, "shape", list, [])
        if not name:
            raise InvalidRequestError(f"an element of '{key}' has no name")
        if any(type(extent) is not int or extent < 0 for extent in shape):
            raise InvalidRequestError("Unable to parse 'shape': attempt to access JSON non-unsigned-integer as "
                                      f"unsigned-integer: the shape of '{name}' is {shape}")
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
