"""The methods of a server that executes models."""
from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message

import protos
from infer_server.endpoints.front import Front
from infer_server.endpoints.grpc.context import CallContext, Serve, unary
from infer_server.endpoints.grpc.errors import parsed
from infer_server.endpoints.grpc.methods import Methods
from infer_server.endpoints.grpc.service.health import health_methods
from infer_server.endpoints.grpc.service.infer import infer
from infer_server.endpoints.grpc.service.infer_calls import InferCalls
from infer_server.endpoints.grpc.service.reflection import reflection_methods
from infer_server.endpoints.grpc.service.stream import infer_stream
from infer_server.endpoints.restrictions import OF_CALL, Restrictions
from infer_server.endpoints.service import Service
from infer_server.lifecycle import Lifecycle

HEADER_PREFIX = "triton-grpc-protocol-"        # of headers with secrets
_MAX_LOAD_BYTES = 1 << 31       # of a RepositoryModelLoad, which may carry the model's files


def service_methods(service: Service, front: Front, lifecycle: Lifecycle, restrictions: Restrictions,
                    has_reflection: bool) -> Methods:
    """Return all methods of a server that executes models."""
    calls: dict[str, Serve] = {"ModelInfer": unary(partial(infer, front)),
                               "ModelStreamInfer": partial(infer_stream, front)}
    methods: dict[str, Serve] = {}
    for method in protos.methods(protos.INFERENCE_SERVICE):
        call = calls.get(method.name) or unary(_control(method, service.call(method.name)))
        methods[method.path] = restricted(call, OF_CALL[method.name], restrictions)
    methods |= {path: restricted(call, "health", restrictions) for path, call in health_methods(lifecycle).items()}
    if has_reflection:
        methods |= reflection_methods()
    return Methods(methods.get, InferCalls(front, restrictions))


def restricted(call: Serve, category: str, restrictions: Restrictions) -> Serve:
    """Return `call` for the clients that may make calls of this category."""
    if category not in restrictions.secrets:
        return call

    async def checked(context: CallContext) -> None:
        restrictions.check(category, dict(context.metadata()).get)
        await call(context)
    return checked


def _control(method: protos.Method, call: Callable[[Any], Awaitable[Message]]
             ) -> Callable[[bytes, CallContext], Awaitable[bytes]]:
    limit = (_MAX_LOAD_BYTES,) if method.name == "RepositoryModelLoad" else ()

    async def serve(data: bytes, _: CallContext) -> bytes:
        return (await call(parsed(method.request, data, *limit))).SerializeToString()
    return serve
