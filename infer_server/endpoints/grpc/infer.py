"""The call ModelInfer: from a serialised request to a serialised response, tensors never parsed by protobuf."""
from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from numpy.typing import NDArray

from infer_server.batching.request import Arrays, AwaitedReply
from infer_server.endpoints.front import Front
from infer_server.endpoints.inflight import OpenCall
from infer_server.endpoints.shared_memory import Place
from infer_server.endpoints.tensors import Asked, Output, places, read, wanted
from infer_server.errors import ServeError
from infer_server.protocol.codec import InputTensor, declared_inputs, decode_inputs, encode_raw
from infer_server.protocol.parameters import NONE, Parameters, from_messages
from infer_server.protocol.wire import InferRequest, join_response, split_request
from infer_server.serving import Call, Inferences, Served
from protos import inference


class GrpcClient:
    """The client of a call, for Inflight."""

    def __init__(self, context: grpc.aio.ServicerContext, disconnect: Callable[[str], None]) -> None:
        """disconnect: ends the connection of a peer as gRPC names it."""
        self.peer = context.peer
        self._disconnect = disconnect

    def disconnect(self) -> None:
        self._disconnect(self.peer())


@dataclass(frozen=True)
class GrpcFront(Front):
    disconnect: Callable[[str], None]       # ends the connection of a peer as gRPC names it


async def infer(data: bytes, context: grpc.aio.ServicerContext, front: GrpcFront) -> bytes:
    """Serves one serialised ModelInferRequest; returns the serialised response. Raises ServeErrors."""
    received_ns = time.monotonic_ns()
    inflight = front.inflight
    held = inflight.begin(GrpcClient(context, front.disconnect), len(data))
    context.add_done_callback(lambda _: inflight.end(held))
    call = GrpcCall(split_request(data), received_ns, context.time_remaining(), front, held)
    response = await _answer(call, front.inferences)
    inflight.answered(held, len(response))
    return response


async def _answer(call: Call, inferences: Inferences) -> bytes:
    reply = AwaitedReply(asyncio.get_running_loop())
    submitted = inferences.submit(call, reply)
    try:
        response: bytes = await reply.response
    except asyncio.CancelledError:
        submitted.cancel()
        raise
    return response


class GrpcCall(Call):
    """A ModelInferRequest; its response is the serialised ModelInferResponse."""
    protocol = "gRPC"

    def __init__(self, message: InferRequest, received_ns: int, remaining_secs: float | None, front: Front,
                 held: OpenCall) -> None:
        """remaining_secs: until its client gives up."""
        self._message, self._header, self._front, self._held = message, message.header, front, held
        self.model, self.version = self._header.model_name, self._header.model_version
        self.received_ns = received_ns
        self.id = self._header.id
        self._places: dict[int, Place] = {}
        if remaining_secs is not None:
            self.deadline_ns = received_ns + int(remaining_secs * 1e9)

    def about(self) -> inference.ModelInferResponse:
        """A response that says whose it is, and no more."""
        return inference.ModelInferResponse(model_name=self.model, model_version=self.version, id=self._header.id)

    def client(self) -> str:
        return self._held.client.peer() if self._held.client else ""

    def inputs(self) -> Sequence[InputTensor]:
        if any(tensor.parameters for tensor in self._header.inputs):
            self._places = places(map(_asked, self._header.inputs), self._front.regions)
        return declared_inputs(self._header.inputs)

    def outputs(self) -> Iterable[str]:
        return (tensor.name for tensor in self._header.outputs)

    def parameters(self) -> Parameters:
        return from_messages(self._header.parameters) if self._header.parameters else NONE

    def expect(self, response_bytes: int) -> None:
        self._front.inflight.expect(self._held, response_bytes)

    def contents(self, tensors: Sequence[InputTensor]) -> dict[str, NDArray[Any]]:
        if not self._places:
            return decode_inputs(self._message, tensors)
        return decode_inputs(self._message, tensors, read(
            self._places, tensors, functools.partial(self._front.inflight.hold, self._held)))

    def encoder(self, served: Served) -> Callable[[Arrays], bytes | ServeError]:
        request_id = self.id
        if any(tensor.parameters for tensor in self._header.outputs):
            outputs = wanted(served, [_asked(tensor) for tensor in self._header.outputs], self._front.regions)
            return lambda computed: _encoded_as_wanted(served, outputs, request_id, computed)

        def encode(computed: Arrays) -> bytes:
            arrays = [computed[spec.name] for spec in served.outputs]
            prefix = _response_header(served, tuple(array.shape for array in arrays))
            raw = [encode_raw(array, spec.datatype) for array, spec in zip(arrays, served.outputs, strict=True)]
            return join_response(prefix, request_id, raw)
        return encode


def _asked(tensor: Any) -> Asked:
    return Asked(tensor.name, from_messages(tensor.parameters) if tensor.parameters else NONE)


@functools.lru_cache(maxsize=4096)
def _response_header(served: Served, shapes: tuple[tuple[int, ...], ...]) -> bytes:
    response = inference.ModelInferResponse(model_name=served.model, model_version=str(served.version))
    for spec, shape in zip(served.outputs, shapes, strict=True):
        response.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=shape)
    return response.SerializeToString()


def _encoded_as_wanted(served: Served, outputs: Sequence[Output], request_id: str,
                       computed: Arrays) -> bytes | ServeError:
    """Outputs in shared memory have raw contents, too, for these are found by position: empty ones."""
    response = inference.ModelInferResponse(model_name=served.model, model_version=str(served.version))
    raw: list[memoryview] = []
    try:
        for output in outputs:
            array = output.array(computed[output.spec.name])
            response.outputs.add(name=output.spec.name, datatype=output.datatype.name, shape=array.shape)
            raw.append(output.place_raw(array) or memoryview(b""))
    except ServeError as error:
        return error
    return join_response(response.SerializeToString(), request_id, raw)
