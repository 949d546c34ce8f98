"""The call ModelInfer: from a serialised request to a serialised response, tensors never parsed by protobuf."""
from __future__ import annotations

import asyncio
import functools
import time

import grpc

from infer_server.batching.request import Arrays, Request
from infer_server.batching.statistics import Failure
from infer_server.config.config import TensorSpec
from infer_server.endpoints.inflight import Inflight, OpenCall
from infer_server.errors import InvalidRequestError, MemoryLimitError, NotServedError
from infer_server.protocol.codec import declared_inputs, decode_inputs, encode_raw
from infer_server.protocol.wire import InferRequest, join_response, split_request
from infer_server.repository.model import Model
from infer_server.repository.repository import Repository
from protos import inference


async def infer(data: bytes, context: grpc.aio.ServicerContext, repository: Repository, inflight: Inflight) -> bytes:
    """Serves one serialised ModelInferRequest; returns the serialised response. Raises ServeErrors."""
    received_ns = time.monotonic_ns()
    call = inflight.begin(context, len(data))
    message = split_request(data)
    model = repository.find(message.header.model_name, message.header.model_version)
    try:
        request = _request(message, model, inflight, call)
    except (InvalidRequestError, NotServedError, MemoryLimitError):
        model.statistics.failed(Failure.OTHER, time.monotonic_ns() - received_ns)
        raise
    request.received_ns = received_ns
    remaining_secs = context.time_remaining()
    if remaining_secs is not None:              # its client does not wait for ever
        request.deadline_ns = received_ns + int(remaining_secs * 1e9)
    model.submit(request)
    try:
        answer = await request.answer
    except asyncio.CancelledError:
        model.cancel(request)
        raise
    inflight.answered(call, len(answer))
    return answer


def _request(message: InferRequest, model: Model, inflight: Inflight, call: OpenCall) -> Request:
    header = message.header
    _refuse_extensions(header)
    tensors = declared_inputs(header)
    fit = model.signature.fit(tensors)
    outputs = model.signature.choose_outputs(tensor.name for tensor in header.outputs)
    inflight.expect(call, fit.items * sum(spec.item_bytes for spec in outputs))

    def encode(computed: Arrays) -> bytes:
        arrays = [computed[spec.name] for spec in outputs]
        prefix = _response_header(model.name, model.version, outputs, tuple(array.shape for array in arrays))
        raw = [encode_raw(array, spec.datatype) for array, spec in zip(arrays, outputs, strict=True)]
        return join_response(prefix, header.id, raw)

    return Request(
        inputs=decode_inputs(message, tensors),
        items=fit.items, shape_key=fit.shape_key, encode=encode,
        answer=asyncio.get_running_loop().create_future(),
        timeout_us=_timeout_us(header))


@functools.lru_cache(maxsize=4096)
def _response_header(model: str, version: int, outputs: tuple[TensorSpec, ...],
                     shapes: tuple[tuple[int, ...], ...]) -> bytes:
    response = inference.ModelInferResponse(model_name=model, model_version=str(version))
    for spec, shape in zip(outputs, shapes, strict=True):
        response.outputs.add(name=spec.name, datatype=spec.datatype.name, shape=shape)
    return response.SerializeToString()


def _timeout_us(header: inference.ModelInferRequest) -> int:
    """The request parameter `timeout`, microseconds; 0 if there is none."""
    if "timeout" not in header.parameters:
        return 0
    parameter = header.parameters["timeout"]
    timeout_us = parameter.uint64_param if parameter.HasField("uint64_param") else parameter.int64_param
    if timeout_us < 0 or parameter.WhichOneof("parameter_choice") not in ("int64_param", "uint64_param"):
        raise InvalidRequestError("parameter 'timeout': expected a positive integer, in microseconds")
    return timeout_us


def _refuse_extensions(header: inference.ModelInferRequest) -> None:
    tensors: list[inference.ModelInferRequest.InferInputTensor | inference.ModelInferRequest.InferRequestedOutputTensor]
    tensors = [*header.inputs, *header.outputs]
    for tensor in tensors:
        if "shared_memory_region" in tensor.parameters:
            raise NotServedError(f"'{tensor.name}': shared memory is not served; send tensors in the messages")
        if "classification" in tensor.parameters:
            raise NotServedError(f"'{tensor.name}': classification is not served; ask for the output itself")
