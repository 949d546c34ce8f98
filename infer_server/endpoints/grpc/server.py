"""The service inference.GRPCInferenceService on grpc.aio."""
from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

import protos
from infer_server.endpoints.grpc.errors import answering, parsed
from infer_server.endpoints.grpc.health import health_handlers
from infer_server.endpoints.grpc.infer import GrpcFront, infer
from infer_server.endpoints.grpc.stream import infer_stream
from infer_server.endpoints.service import Service
from infer_server.lifecycle import Lifecycle


def inference_handlers(service: Service, front: GrpcFront) -> grpc.GenericRpcHandler:
    """The handlers of every call of the service."""
    async def model_infer(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return await infer(data, context, front)

    async def model_stream_infer(_: Any, context: grpc.aio.ServicerContext) -> None:
        await infer_stream(context, front)

    handlers = {}
    for method in protos.methods(protos.INFERENCE_SERVICE):
        if method.name == "ModelInfer":
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(answering(model_infer))
        elif method.name == "ModelStreamInfer":
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(answering(model_stream_infer))
        else:
            handlers[method.name] = _served(method, service.call(method.name))
    return grpc.method_handlers_generic_handler(protos.INFERENCE_SERVICE, handlers)


def _concerns_us(record: logging.LogRecord) -> bool:
    """Whether gRPC complains of something else than a client that went away while its answer was being sent."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


logging.getLogger("grpc._cython.cygrpc").addFilter(_concerns_us)


def create_server(service: Service, front: GrpcFront, lifecycle: Lifecycle,
                  max_message_bytes: int) -> grpc.aio.Server:
    """A gRPC server, not started, without ports. Larger messages than `max_message_bytes` get RESOURCE_EXHAUSTED."""
    server = grpc.aio.server(options=[
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),               # a second server on the same port is a mistake, not a share of the load
    ])
    server.add_generic_rpc_handlers((inference_handlers(service, front), health_handlers(lifecycle)))
    return server


def _served(method: protos.Method, call: Callable[[Any], Awaitable[Message]]) -> grpc.RpcMethodHandler:
    async def serve(data: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return (await call(parsed(method.request, data))).SerializeToString()

    return grpc.unary_unary_rpc_method_handler(answering(serve))
