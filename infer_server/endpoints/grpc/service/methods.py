"""gRPC methods of a server that executes models."""
from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message

from infer_server import protos
from infer_server.endpoints.grpc.context import CallContext, Serve, unary
from infer_server.endpoints.grpc.errors import parsed
from infer_server.endpoints.grpc.methods import INFER_PATH, Methods, awaiting
from infer_server.endpoints.grpc.service.health import health_methods
from infer_server.endpoints.grpc.service.infer_calls import InferCalls
from infer_server.endpoints.grpc.service.reflection import reflection_methods
from infer_server.endpoints.grpc.service.stream import infer_stream
from infer_server.endpoints.restrictions import CATEGORY_BY_CALL, Restrictions
from infer_server.endpoints.service import Service
from infer_server.endpoints.services import InferenceServices
from infer_server.lifecycle import Lifecycle

HEADER_PREFIX = "triton-grpc-protocol-"        # prefix of headers with secrets
_MAX_LOAD_BYTES = 1 << 31       # limit of a RepositoryModelLoad, which may contain the model's files


def service_methods(service: Service, services: InferenceServices, lifecycle: Lifecycle, restrictions: Restrictions,
                    has_reflection: bool) -> Methods:
    """Return all methods of a server that executes models."""
    methods: dict[str, Serve] = {}
    infers = InferCalls(services, restrictions)
    for method in protos.methods(protos.INFERENCE_SERVICE):
        check = partial(_check, restrictions, CATEGORY_BY_CALL[method.name])
        if method.name == "ModelStreamInfer":
            methods[method.path] = partial(infer_stream, services, check)
        elif method.path == INFER_PATH:
            methods[method.path] = awaiting(infers, services.inflight, services.max_message_bytes)
        else:
            methods[method.path] = unary(_control(method, service.call(method.name)), check)
    methods |= health_methods(lifecycle, partial(_check, restrictions, "health"))
    if has_reflection:
        methods |= reflection_methods()
    return Methods(methods.get, infers, services.load.binary if services.load else None)


def _check(restrictions: Restrictions, category: str, context: CallContext) -> None:
    """Raise RestrictedError unless the client may make calls of this category."""
    if category in restrictions.secrets:
        restrictions.check(category, dict(context.metadata()).get)


def _control(method: protos.Method, call: Callable[[Any], Awaitable[Message]]
             ) -> Callable[[bytes, CallContext], Awaitable[bytes]]:
    limit = (_MAX_LOAD_BYTES,) if method.name == "RepositoryModelLoad" else ()

    async def serve(data: bytes, _: CallContext) -> bytes:
        return (await call(parsed(method.request, data, *limit))).SerializeToString()
    return serve
