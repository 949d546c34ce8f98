"""Readiness for load balancers and probes: grpc.health.v1.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""
from __future__ import annotations

import grpc

import protos
from infer_server.endpoints.grpc.errors import answering, parsed
from infer_server.endpoints.restrictions import Restrictions
from infer_server.errors import UnknownServiceError
from infer_server.lifecycle import Lifecycle
from protos import health

_SERVICES = ("", protos.INFERENCE_SERVICE)      # "" is the server as a whole


def health_handlers(lifecycle: Lifecycle, restrictions: Restrictions) -> grpc.GenericRpcHandler:
    """Check and Watch, over the readiness of the server."""

    async def check(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        restrictions.check("health", dict(context.invocation_metadata() or ()).get)
        request = parsed(health.HealthCheckRequest, data)
        if request.service not in _SERVICES:
            raise UnknownServiceError(f"unknown service '{request.service}'")
        return _response(lifecycle.ready).SerializeToString()

    async def watch(data: bytes, context: grpc.aio.ServicerContext) -> None:
        restrictions.check("health", dict(context.invocation_metadata() or ()).get)
        request = parsed(health.HealthCheckRequest, data)
        last = None
        async for ready in lifecycle.readiness():      # ends when the server stops, so that no watcher holds it up
            response = _response(ready) if request.service in _SERVICES else health.HealthCheckResponse(
                status=health.HealthCheckResponse.SERVICE_UNKNOWN)
            if response != last:
                await context.write(response.SerializeToString())
            last = response

    return grpc.method_handlers_generic_handler(protos.HEALTH_SERVICE, {
        "Check": grpc.unary_unary_rpc_method_handler(answering(check)),
        "Watch": grpc.unary_stream_rpc_method_handler(answering(watch))})


def _response(ready: bool) -> health.HealthCheckResponse:
    return health.HealthCheckResponse(
        status=health.HealthCheckResponse.SERVING if ready else health.HealthCheckResponse.NOT_SERVING)
