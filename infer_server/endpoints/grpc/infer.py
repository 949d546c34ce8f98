"""The call ModelInfer: from a serialised request to a serialised response, tensors never parsed by protobuf."""
from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
from numpy.typing import NDArray

from infer_server.batching.request import Arrays, AwaitedReply
from infer_server.endpoints.inflight import Inflight
from infer_server.errors import InvalidRequestError, NotServedError
from infer_server.protocol.codec import InputTensor, declared_inputs, decode_inputs, encode_raw
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


async def infer(data: bytes, context: grpc.aio.ServicerContext, inferences: Inferences, inflight: Inflight,
                disconnect: Callable[[str], None]) -> bytes:
    """Serves one serialised ModelInferRequest; returns the serialised response. Raises ServeErrors.

    disconnect: as GrpcClient's.
    """
    received_ns = time.monotonic_ns()
    held = inflight.begin(GrpcClient(context, disconnect), len(data))
    context.add_done_callback(lambda _: inflight.end(held))
    call = GrpcCall(split_request(data), received_ns, context.time_remaining(),
                    functools.partial(inflight.expect, held))
    response = await _answer(call, inferences)
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

    def __init__(self, message: InferRequest, received_ns: int, remaining_secs: float | None,
                 expect: Callable[[int], None]) -> None:
        """remaining_secs: until its client gives up. expect: as Call.expect."""
        self._message, self._header, self._expect = message, message.header, expect
        self.model, self.version = self._header.model_name, self._header.model_version
        self.received_ns = received_ns
        self.id = self._header.id
        if remaining_secs is not None:
            self.deadline_ns = received_ns + int(remaining_secs * 1e9)

    def inputs(self) -> Sequence[InputTensor]:
        _refuse_extensions(self._header)
        return declared_inputs(self._header.inputs)

    def outputs(self) -> Iterable[str]:
        return (tensor.name for tensor in self._header.outputs)

    def expect(self, response_bytes: int) -> None:
        self._expect(response_bytes)

    def contents(self, tensors: Sequence[InputTensor]) -> dict[str, NDArray[Any]]:
        return decode_inputs(self._message, tensors)

    def encoder(self, served: Served) -> Callable[[Arrays], bytes]:
        request_id = self._header.id

        def encode(computed: Arrays) -> bytes:
            arrays = [computed[spec.name] for spec in served.outputs]
            prefix = _response_header(served, tuple(array.shape for array in arrays))
            raw = [encode_raw(array, spec.datatype) for array, spec in zip(arrays, served.outputs, strict=True)]
            return join_response(prefix, request_id, raw)
        return encode

    def timeout_us(self) -> int:
        if "timeout" not in self._header.parameters:
            return 0
        parameter = self._header.parameters["timeout"]
        timeout_us = parameter.uint64_param if parameter.HasField("uint64_param") else parameter.int64_param
        if timeout_us < 0 or parameter.WhichOneof("parameter_choice") not in ("int64_param", "uint64_param"):
            raise InvalidRequestError("parameter 'timeout': expected a positive integer, in microseconds")
        return timeout_us


    def parameters(self) -> dict[str, Any]:
        return {name: getattr(value, value.WhichOneof("parameter_choice") or "int64_param")
                for name, value in self._header.parameters.items()} if self._header.parameters else {}


@functools.lru_cache(maxsize=4096)
def _response_header(served: Served, shapes: tuple[tuple[int, ...], ...]) -> bytes:
    response = inference.ModelInferResponse(model_name=served.model, model_version=str(served.version))
    for spec, shape in zip(served.outputs, shapes, strict=True):
        response.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=shape)
    return response.SerializeToString()


def _refuse_extensions(header: inference.ModelInferRequest) -> None:
    tensors: list[inference.ModelInferRequest.InferInputTensor | inference.ModelInferRequest.InferRequestedOutputTensor]
    tensors = [*header.inputs, *header.outputs]
    for tensor in tensors:
        if "shared_memory_region" in tensor.parameters:
            raise NotServedError(f"'{tensor.name}': shared memory is not served; send tensors in the messages")
        if "classification" in tensor.parameters:
            raise NotServedError(f"'{tensor.name}': classification is not served; ask for the output itself")
