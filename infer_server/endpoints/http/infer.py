"""Inference requests over HTTP: tensors in JSON, or as bytes after the JSON (the binary tensor data extension).

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""
from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from infer_server.batching.request import Arrays, Outputs, Reply, parameters_of
from infer_server.config.config import ModelConfig
from infer_server.endpoints.http.exchange import Exchange
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, accepted, compressed, json_text
from infer_server.endpoints.inflight import OpenCall
from infer_server.endpoints.services import InferenceServices
from infer_server.endpoints.shared_memory import Regions, TensorLocation
from infer_server.endpoints.tensors import (
    Output,
    RequestedTensor,
    checking_inputs,
    gpu_buffers,
    read,
    requested_outputs,
)
from infer_server.errors import InvalidRequestError, ServeError, TooLargeError
from infer_server.gpu_tensors import GpuBuffer
from infer_server.protocol.codec import InputTensor, declared_inputs, encode_raw, from_raw, object_bytes
from infer_server.protocol.json_documents import LARGE_BYTES, read_inference
from infer_server.protocol.json_inference import Form, as_object, typed
from infer_server.protocol.json_tensors import MANY, NO_JSON, from_json, json_pieces, read_values, to_json
from infer_server.protocol.json_values import JsonArray, parsed
from infer_server.protocol.parameters import Parameters, digits
from infer_server.protocol.wire import MAX_CACHED_FORMS, MAX_CACHED_HEADER_BYTES
from infer_server.repository.model import Model
from infer_server.serving import InferenceCall, Served

_JSON_BYTES = "inference-header-content-length"     # header: size of the JSON in the body; binary tensors follow it
LITTLE_JSON_BYTES = 16 << 10                        # outputs up to this size are quickly encoded as JSON
_NO_VALUES: Mapping[int, Sequence[bytes]] = MappingProxyType({})
_FEW_TENSORS = 64                                   # up to so many tensors are reported by name if they are too many


def infer(exchange: Exchange, model: str, version: str, services: InferenceServices,
          find: Callable[[str, str], Model]) -> None:
    """Submit the inference request of an exchange, which is answered when it is computed. Raises ServeErrors.

    find: returns the model of a name and a version.
    """
    request = exchange.request
    size = json_size(request)
    if size > LARGE_BYTES:
        exchange.answer_later(_infer_large(exchange, size, model, version, services, find))
        return
    form, binary = (_raw_form(find(model, version).config, request.body) if request.headers.get(_JSON_BYTES) == "0"
                    else _split(request, size, lambda: find(model, version).config))
    _submit(exchange, HttpCall(request, form, binary, model, version, services, exchange.open_call))


async def _infer_large(exchange: Exchange, size: int, model: str, version: str, services: InferenceServices,
                       find: Callable[[str, str], Model]) -> None:
    """Submit a request whose `size` bytes of JSON are parsed in steps; values only if the tensors match the model."""
    request, inflight = exchange.request, services.inflight
    if size > services.max_json_bytes:
        raise TooLargeError(f"request JSON size of {size} bytes exceeds the maximum allowed input size of "
                            f"{services.max_json_bytes} bytes. Use --http-max-json-mib to increase the limit")
    loaded, hold = find(model, version), functools.partial(inflight.hold, exchange.open_call)
    head = await inflight.steps.run(exchange.while_present(read_inference(request.body, size, hold)))
    _check_counts(head, loaded.config)
    call = HttpCall(request, Form(head), memoryview(request.body)[size:], model, version, services, exchange.open_call)
    try:
        loaded.signature.fit(call.inputs())
    except InvalidRequestError:         # submit() raises it again and counts it
        pass
    else:
        await call.read_json(exchange)
        if size == len(request.body):
            exchange.request = request._replace(body=b"")
    if not exchange.gone:
        _submit(exchange, call)


def _submit(exchange: Exchange, call: HttpCall) -> None:
    exchange.when_left(call.services.inferences.submit(call, _InferReply(exchange)).cancel)


class HttpReply(Reply):
    """Base class of replies to an exchange."""

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


class HttpInferenceCall(InferenceCall):
    """Base class of inference requests over HTTP."""
    protocol = "HTTP"

    def __init__(self, request: HttpRequest, model: str, version: str, services: InferenceServices,
                 open_call: OpenCall) -> None:
        self.model, self.version, self.received_ns = model, version, request.received_ns
        self.services, self._open_call, self._headers = services, open_call, request.headers
        self._answer_bytes = 0                  # 0: unknown

    def client(self) -> str:
        return self._open_call.client.peer() if self._open_call.client else ""

    def headers(self) -> Iterable[tuple[str, str]]:
        return self._headers.items()

    def expect(self, response_bytes: int, decoded_bytes: int) -> None:
        self._answer_bytes = response_bytes
        self.services.inflight.expect(self._open_call, response_bytes, decoded_bytes)


class HttpCall(HttpInferenceCall):
    """Inference request over HTTP; its response is an HttpResponse."""
    _in_place: Sequence[TensorLocation] = ()  # shared memory that is read during execution; set by contents()

    def __init__(self, request: HttpRequest, form: Form, binary: memoryview, model: str, version: str,
                 services: InferenceServices, open_call: OpenCall) -> None:
        """Take the body of a request in two parts: the JSON, parsed, and the binary tensors."""
        super().__init__(request, model, version, services, open_call)
        self._read: dict[int, NDArray[Any] | InvalidRequestError] = {}      # long JSON arrays, by the input's position
        self._form, self._binary = form, binary
        self.id = form.id
        self.form = form if form.is_cached else None
        self._coding = accepted(request.headers) if "accept-encoding" in request.headers else ""

    def inputs(self) -> Sequence[InputTensor]:
        return declared_inputs(self._form.inputs, self.model)

    def outputs(self) -> Iterable[str]:
        return (tensor.name for tensor in self._form.outputs)

    def parameters(self) -> Parameters:
        return self._form.parameters

    async def read_json(self, exchange: Exchange) -> None:
        """Convert the long JSON arrays of the inputs in steps, for contents()."""
        inflight = self.services.inflight
        for i, (tensor, member) in enumerate(zip(self.inputs(), self._form.inputs, strict=True)):
            if isinstance(member.data, JsonArray):
                steps = read_values(tensor, member.data, functools.partial(inflight.hold, self._open_call))
                try:
                    self._read[i] = await inflight.steps.run(exchange.while_present(steps))
                except InvalidRequestError as error:
                    self._read[i] = error
        self._form.forget_values()

    def contents(self, tensors: Sequence[InputTensor], devices: Set[int | None]) -> Mapping[str, Any]:
        arrays: dict[str, Any] = {}
        at = 0
        shared: Mapping[int, Any] = {}
        if references := self._form.references:
            shared, self._in_place = read(references, tensors, self.services.regions,
                                          functools.partial(self.services.inflight.hold, self._open_call), devices)
        for i, (tensor, member, size) in enumerate(zip(tensors, self._form.inputs, self._form.sizes, strict=True)):
            if i in shared:
                arrays[tensor.name] = from_raw(tensor, raw) if isinstance(raw := shared[i], memoryview) else raw
                continue
            if size is None:
                arrays[tensor.name] = self._from_json(i, tensor, member.data)
                continue
            if member.data is not None:
                raise InvalidRequestError(f"{tensor}: 'data' and 'binary_data_size' must not both be given")
            if size < 0:
                raise InvalidRequestError(f"{tensor}: a binary_data_size of {size}")
            if (left := len(self._binary) - at) < size:
                raise InvalidRequestError(f"unexpected size for input '{tensor.name}', expecting {size - left} "
                                          f"additional bytes for model '{self.model}': binary_data_size {size} exceeds "
                                          f"the {left} bytes that are left of the body")
            self.services.inflight.hold(self._open_call, object_bytes(tensor, size))
            arrays[tensor.name] = from_raw(tensor, self._binary[at:at + size])
            at += size
        if at != len(self._binary):
            raise InvalidRequestError(f"unexpected additional input data for model '{self.model}': "
                                      f"{len(self._binary) - at} bytes of the body belong to no input")
        return arrays

    def _from_json(self, i: int, tensor: InputTensor, data: Any) -> NDArray[Any]:
        array = self._read.get(i)
        if array is None:
            return from_json(tensor, data)
        if isinstance(array, InvalidRequestError):
            raise array
        return array

    def encoder(self, served: Served) -> Callable[[Arrays], HttpResponse | ServeError]:
        encode = _encoder_of(self._form, served, self.services.regions)
        writes_much = not all(encode.binary) and not 0 < self._answer_bytes <= LITTLE_JSON_BYTES
        self.lengthy = bool(self._coding) or encode.writes_shared_memory or writes_much
        self.gpu_buffers = encode.gpu_buffers
        return checking_inputs(
            self._in_place, functools.partial(_compressed, encode, self._coding) if self._coding else encode)


def _compressed(encode: Encoder, coding: str, computed: Arrays) -> HttpResponse | ServeError:
    response = encode(computed)
    return compressed(response, coding) if isinstance(response, HttpResponse) else response


@dataclass(frozen=True, eq=False)
class Encoder:
    """Encoder of computed outputs as responses; runs on an instance's thread."""
    served: Served
    outputs: Sequence[Output]
    binary: Sequence[bool]              # for each output: True if its bytes follow the JSON
    request_id: str

    @functools.cached_property
    def writes_shared_memory(self) -> bool:
        """True if an output goes into shared memory."""
        return any(output.location for output in self.outputs)

    @functools.cached_property
    def gpu_buffers(self) -> Mapping[str, GpuBuffer]:
        return gpu_buffers(self.outputs) if self.writes_shared_memory else {}

    @functools.cached_property
    def _plain(self) -> frozenset[str]:
        """Names of the outputs if the JSON depends on their shapes only (binary, fixed-size elements), else none."""
        plain = all(self.binary) and not self.writes_shared_memory and not any(
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
        values: dict[int, list[bytes]] = {}
        try:
            for output, raw in zip(self.outputs, self.binary, strict=True):
                if output.spec.name in computed:
                    array = output.array(computed[output.spec.name])
                    if not (raw or output.location) and array.size > MANY:
                        values[len(described)] = list(json_pieces(array, output.datatype.name))
                    described.append(self._describe(output, raw, array, pieces, is_long=len(described) in values))
        except ServeError as error:
            return error
        head = self.head(described, parameters_of(computed), bool(pieces), values)
        return head._replace(body=(*head.body, *pieces))

    def head(self, described: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any], is_binary: bool,
             values: Mapping[int, Sequence[bytes]] = _NO_VALUES) -> HttpResponse:
        """Return a response with its JSON only.

        is_binary: arrays follow it. values: `data` of long outputs as pieces of JSON text, by the output's position.
        """
        body: dict[str, Any] = {"id": self.request_id} if self.request_id else {}
        body |= {"model_name": self.served.model, "model_version": str(self.served.version)}
        if parameters:
            body["parameters"] = dict(parameters)
        body["outputs"] = described
        texts: list[bytes] = []
        if values:
            body["outputs"] = ()
            texts.append(json_text(body).removesuffix(b"]}"))
            for i, one in enumerate(described):
                text = b"," * bool(i) + json_text(one)
                texts += (text[:-1], b',"data":', *values[i], b"}") if i in values else (text,)
            texts.append(b"]}")
        else:
            texts.append(json_text(body))
        if not is_binary:
            return HttpResponse(texts)
        return HttpResponse(texts, content_type="application/octet-stream",
                            headers={"Inference-Header-Content-Length": str(sum(map(len, texts)))})

    def _describe(self, output: Output, raw: bool, array: NDArray[Any],
                  pieces: list[bytes | memoryview], is_long: bool) -> dict[str, Any]:
        """Return the JSON of an output, without `data` if it is long; append binary data to `pieces`."""
        one: dict[str, Any] = {"name": output.spec.name, "datatype": output.datatype.name, "shape": array.shape}
        if output.location or raw:
            content = output.write_raw(array)
            if content is not None:     # outputs in shared memory get no parameters: clients would read them as sizes
                pieces.append(bytes(content))       # the array is the engine's, for this batch only
                one["parameters"] = {"binary_data_size": len(pieces[-1])}
        elif not is_long:
            one["data"] = to_json(array, output.datatype.name)
        return one


@functools.lru_cache(MAX_CACHED_FORMS)
def _plain_head(encoder: Encoder, shapes: Sequence[tuple[int, ...]]) -> HttpResponse:
    """Return the response without the arrays, for outputs of these shapes."""
    return encoder.head([
        {"name": output.spec.name, "datatype": output.datatype.name, "shape": shape,
         "parameters": {"binary_data_size": math.prod(shape) * output.datatype.array.itemsize}}
        for output, shape in zip(encoder.outputs, shapes, strict=True)], {}, is_binary=True)


def _encoder_of(form: Form, served: Served, regions: Regions) -> Encoder:
    """Return the encoder of responses to requests of a form. Raises ServeErrors."""
    encoder: Encoder | None = form.encoder
    if encoder is None or encoder.served is not served:
        encoder = _encoder(form, served, regions)
        if not encoder.writes_shared_memory:  # a region may have been replaced by the next request
            form.encoder = encoder
    return encoder


def _encoder(form: Form, served: Served, regions: Regions) -> Encoder:
    every = typed(form.parameters, "binary_data_output", bool, False)
    in_bytes = {tensor.name: typed(tensor.parameters, "binary_data", bool, every) for tensor in form.outputs}
    outputs = requested_outputs(served, [RequestedTensor(*tensor.name_and_parameters()) for tensor in form.outputs],
                                regions)
    binary = tuple(in_bytes.get(spec.name, every) for spec in served.outputs)
    for output, raw in zip(outputs, binary, strict=True):
        if not raw and not output.location and output.datatype.name in NO_JSON:
            raise InvalidRequestError(f"sending {output.datatype.name} data via JSON is not supported. Please use "
                                      f"the binary data format for output '{output.spec.name}': ask for it with "
                                      "\"binary_data\": true")
    return Encoder(served, outputs, binary, form.id)


# ---- the message
def _split(request: HttpRequest, size: int, config: Callable[[], ModelConfig]) -> tuple[Form, memoryview]:
    """Split a body into the form of its JSON, of `size` bytes, and the binary data. Raises InvalidRequestError."""
    head = bytes(request.body[:size])
    if _JSON_BYTES in request.headers and size <= MAX_CACHED_HEADER_BYTES:
        return _cached_form(head), memoryview(request.body)[size:]
    members = as_object(parsed(head), "the request")
    _check_counts(members, config())
    return Form(members), memoryview(request.body)[size:]


def _check_counts(head: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise InvalidRequestError for many more tensors than the model has; a later check reports few by name."""
    for key, specs in (("inputs", config.inputs), ("outputs", config.outputs)):
        tensors = head.get(key)
        if isinstance(tensors, list) and len(tensors) > max(_FEW_TENSORS, len(specs)):
            raise InvalidRequestError(f"the request has {len(tensors)} {key}, and model '{config.name}' {len(specs)}")


def json_size(request: HttpRequest) -> int:
    """Return the size of the JSON at the start of a body in bytes. Raises InvalidRequestError for a bad header."""
    length = request.headers.get(_JSON_BYTES)
    if length is None:
        return len(request.body)
    if (size := digits(length)) is None:
        raise InvalidRequestError(f"Unable to parse Inference-Header-Content-Length, got: {length}, which is no number "
                                  "of bytes")
    if size > len(request.body):
        raise InvalidRequestError(f"inference header size should be in range (0, {len(request.body)}), got: {length}, "
                                  "which is more than the body has (Inference-Header-Content-Length)")
    return size


@functools.lru_cache(MAX_CACHED_FORMS)
def _cached_form(head: bytes) -> Form:
    return Form(as_object(parsed(head), "the request"), is_cached=True)


def _raw_form(config: ModelConfig, body: bytes | bytearray) -> tuple[Form, memoryview]:
    """Return the form and the bytes of a raw binary request, whose body is one item of the model's only input.

    All outputs are returned as binary data. Raises InvalidRequestError if the model does not determine the shape.
    """
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
