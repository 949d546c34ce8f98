"""The service inference.GRPCInferenceService on grpc.aio."""
from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

import protos
from infer_server.endpoints.grpc.aio import Behind, aio_server
from infer_server.endpoints.grpc.calls import InferCalls
from infer_server.endpoints.grpc.errors import answering, parsed
from infer_server.endpoints.grpc.fast import FastServer
from infer_server.endpoints.grpc.health import health_handlers
from infer_server.endpoints.grpc.infer import GrpcFront, infer
from infer_server.endpoints.grpc.reflection import add_reflection
from infer_server.endpoints.grpc.stream import infer_stream
from infer_server.endpoints.restrictions import OF_CALL, Restrictions, Secret
from infer_server.endpoints.service import Service
from infer_server.lifecycle import Lifecycle

Call = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


def inference_handlers(service: Service, front: GrpcFront, restrictions: Restrictions) -> grpc.GenericRpcHandler:
    """The handlers of every call of the service."""
    def model_infer(data: bytes, context: grpc.aio.ServicerContext) -> Awaitable[bytes]:
        return infer(data, context, front)

    async def model_stream_infer(_: Any, context: grpc.aio.ServicerContext) -> None:
        await infer_stream(context, front)

    calls: dict[str, Call] = {"ModelInfer": model_infer, "ModelStreamInfer": model_stream_infer}
    handlers = {}
    for method in protos.methods(protos.INFERENCE_SERVICE):
        call = calls.get(method.name) or _served(method, service.call(method.name))
        handler = grpc.stream_stream_rpc_method_handler if method.server_streaming else (
            grpc.unary_unary_rpc_method_handler)
        handlers[method.name] = handler(answering(_restricted(call, OF_CALL[method.name], restrictions)))
    return grpc.method_handlers_generic_handler(protos.INFERENCE_SERVICE, handlers)


def _restricted(call: Call, category: str, restrictions: Restrictions) -> Call:
    """The same call for those who may make it."""
    if category not in restrictions.secrets:
        return call

    async def checked(request: Any, context: grpc.aio.ServicerContext) -> Any:
        restrictions.check(category, dict(context.invocation_metadata() or ()).get)
        return await call(request, context)
    return checked


_ANY_BYTES = 1 << 31        # of a model to be loaded, with its files
HEADER_PREFIX = "triton-grpc-protocol-"        # of headers with secrets


@dataclass(frozen=True)
class GrpcSettings:
    max_message_bytes: int
    channel: Mapping[str, int] = field(default_factory=dict)    # of the C core, by name: keepalive, ages
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    fast: bool = False                      # inference on pygrpc-native
    reflection: bool = False                # tools may ask for the protocol's definitions


def create_server(service: Service, front: GrpcFront, lifecycle: Lifecycle,
                  settings: GrpcSettings) -> grpc.aio.Server | FastServer:
    """A gRPC server, not started, without ports."""
    server = aio_server(settings.max_message_bytes, settings.channel)
    restrictions = Restrictions(settings.secrets, HEADER_PREFIX)
    server.add_generic_rpc_handlers((inference_handlers(service, front, restrictions),
                                     health_handlers(lifecycle, restrictions)))
    if settings.reflection:
        add_reflection(server)
    if settings.fast:
        return FastServer(Behind(server), partial(InferCalls, front, restrictions), settings.max_message_bytes,
                          settings.channel, front.inflight, front.disconnect)
    return server


def _served(method: protos.Method, call: Callable[[Any], Awaitable[Message]]) -> Call:
    limit = (_ANY_BYTES,) if method.name == "RepositoryModelLoad" else ()

    async def serve(data: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return (await call(parsed(method.request, data, *limit))).SerializeToString()

    return serve
