"""ModelInfer: from a serialised request to a serialised response; protobuf never parses the tensors."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from infer_server.batching.request import Arrays, Outputs, parameters_of
from infer_server.endpoints.grpc.context import HasHeaders
from infer_server.endpoints.inflight import OpenCall
from infer_server.endpoints.services import InferenceServices
from infer_server.endpoints.shared_memory import TensorLocation
from infer_server.endpoints.tensors import (
    Output,
    RequestedTensor,
    checking_inputs,
    gpu_buffers,
    read,
    requested_outputs,
)
from infer_server.errors import ServeError
from infer_server.protocol.codec import InputTensor, declared_inputs, decode_inputs, encode_raw, object_bytes
from infer_server.protocol.parameters import NONE, Parameters, from_messages, set_parameter
from infer_server.protocol.wire import InferRequest, join_response, response_prefix
from infer_server.protos import inference
from infer_server.serving import InferenceCall, Served

_FEW_BYTES = 64 << 10       # size of a batch's output up to which one copy is split into responses


class GrpcCall(InferenceCall):
    """ModelInferRequest; its response is a serialised ModelInferResponse."""
    protocol = "gRPC"
    _shared_inputs: Sequence[TensorLocation] = ()  # shared memory read during the execution; known after contents()

    def __init__(self, message: InferRequest, received_ns: int, remaining_secs: float | None,
                 services: InferenceServices, open_call: OpenCall) -> None:
        """Wrap a parsed request; `remaining_secs` is the time until the client's deadline."""
        form = message.form
        self._message, self._services, self._open_call = message, services, open_call
        self.model, self.version, self.id = form.model, form.version, message.id
        self.form = form if form.is_cached else None
        self.received_ns = received_ns
        if remaining_secs is not None:
            self.deadline_ns = received_ns + int(remaining_secs * 1e9)

    def about(self) -> inference.ModelInferResponse:
        """Return a response with the names of the model and the request only."""
        return inference.ModelInferResponse(model_name=self.model, model_version=self.version, id=self.id)

    def client(self) -> str:
        return self._open_call.client.peer() if self._open_call.client else ""

    def headers(self) -> Iterable[tuple[str, str]]:
        client = self._open_call.client
        return client.headers() if isinstance(client, HasHeaders) else ()

    def inputs(self) -> Sequence[InputTensor]:
        return declared_inputs(self._message.header.inputs, self.model)

    def outputs(self) -> Iterable[str]:
        return (tensor.name for tensor in self._message.header.outputs)

    def parameters(self) -> Parameters:
        parameters = self._message.header.parameters
        return from_messages(parameters) if parameters else NONE

    def expect(self, response_bytes: int, decoded_bytes: int) -> None:
        self._services.inflight.expect(self._open_call, response_bytes, decoded_bytes)

    def contents(self, tensors: Sequence[InputTensor], devices: Set[int | None]) -> Mapping[str, Any]:
        sent_bytes = self._open_call.held_bytes
        for tensor in tensors:
            if not tensor.is_plain:
                self._services.inflight.hold(self._open_call, object_bytes(tensor, sent_bytes))
        if not (references := self._message.form.references):
            return decode_inputs(self._message, tensors)
        found = read(references, tensors, self._services.regions,
                     functools.partial(self._services.inflight.hold, self._open_call), devices)
        self._shared_inputs = found.in_place
        return decode_inputs(self._message, tensors, found.arrays)

    def encoder(self, served: Served) -> Callable[[Arrays], bytes | ServeError]:
        form = self._message.form
        if not form.outputs_have_parameters:
            return checking_inputs(self._shared_inputs, GrpcEncoder(served, self.id))
        outputs = requested_outputs(served, [_requested(tensor) for tensor in form.header.outputs],
                                    self._services.regions)
        self.lengthy, self.gpu_buffers = any(output.location for output in outputs), gpu_buffers(outputs)
        return checking_inputs(self._shared_inputs, functools.partial(_encode_requested, served, outputs, self.id))


class GrpcEncoder:
    """Encoder of responses with all outputs, of one request or of several that were executed together."""
    __slots__ = ("_served", "_id")

    def __init__(self, served: Served, request_id: str = "") -> None:
        self._served, self._id = served, request_id

    def __call__(self, computed: Arrays) -> bytes | ServeError:
        served = self._served
        if isinstance(computed, Outputs):
            return _encode_requested(served, [Output(spec) for spec in served.outputs], self._id, computed)
        arrays = [computed[spec.name] for spec in served.outputs]
        prefix = _response_header(served, tuple([array.shape for array in arrays]))
        raw = [encode_raw(array, spec.datatype) for array, spec in zip(arrays, served.outputs, strict=True)]
        return join_response(prefix, self._id, raw)

    def each(self, computed: Arrays, count: int) -> list[bytes] | None:
        """See EncodesTogether."""
        served = self._served
        if len(served.outputs) != 1 or self._id:
            return None
        spec, array = served.outputs[0], computed[served.outputs[0].name]
        datatype, total = spec.datatype, array.nbytes
        if total > _FEW_BYTES or array.dtype is not datatype.array or datatype.name == "BYTES":
            return None
        raw, size = array.tobytes(), total // count
        prefix = response_prefix(_response_header(served, ((len(array) // count, *array.shape[1:]),)), size)
        return [prefix + raw] if count == 1 else [prefix + raw[at:at + size] for at in range(0, len(raw), size)]


def _requested(tensor: Any) -> RequestedTensor:
    return RequestedTensor(tensor.name, from_messages(tensor.parameters) if tensor.parameters else NONE)


@functools.lru_cache(maxsize=4096)
def _response_header(served: Served, shapes: tuple[tuple[int, ...], ...]) -> bytes:
    response = inference.ModelInferResponse(model_name=served.model, model_version=str(served.version))
    for spec, shape in zip(served.outputs, shapes, strict=True):
        response.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=shape)
    return response.SerializeToString()


def _encode_requested(served: Served, outputs: Sequence[Output], request_id: str,
                       computed: Arrays) -> bytes | ServeError:
    """Encode the requested outputs.

    One in shared memory gets empty raw contents, since these are matched by position.
    """
    response = inference.ModelInferResponse(model_name=served.model, model_version=str(served.version))
    raw: list[memoryview] = []
    try:
        for name, value in parameters_of(computed).items():
            set_parameter(response.parameters[name], value)
        for output in outputs:
            if output.spec.name not in computed:
                continue
            array = output.array(computed[output.spec.name])
            response.outputs.add(name=output.spec.name, datatype=output.datatype.name, shape=array.shape)
            raw.append(output.write_raw(array) or memoryview(b""))
    except ServeError as error:
        return error
    return join_response(response.SerializeToString(), request_id, raw)
