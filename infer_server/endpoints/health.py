"""grpc.health.v1, for load balancers and probes. https://github.com/grpc/grpc/blob/master/doc/health-checking.md"""
from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

import protos
from infer_server.lifecycle import Lifecycle, Phase
from protos import health

_SERVICES = ("", protos.INFERENCE_SERVICE)      # "" is the server as a whole


def health_handlers(lifecycle: Lifecycle) -> grpc.GenericRpcHandler:
    """Check and Watch, over the phases of the server."""

    async def check(request: health.HealthCheckRequest,
                    context: grpc.aio.ServicerContext) -> health.HealthCheckResponse:
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service '{request.service}'")
        return _response(lifecycle.phase)

    async def watch(request: health.HealthCheckRequest,
                    _: grpc.aio.ServicerContext) -> AsyncIterator[health.HealthCheckResponse]:
        known = request.service in _SERVICES
        last = None
        async for phase in lifecycle.phases():      # ends when the server stops, so that no watcher holds it up
            response = _response(phase) if known else health.HealthCheckResponse(
                status=health.HealthCheckResponse.SERVICE_UNKNOWN)
            if response != last:
                yield response
            last = response

    codec = (health.HealthCheckRequest.FromString, health.HealthCheckResponse.SerializeToString)
    return grpc.method_handlers_generic_handler(protos.HEALTH_SERVICE, {
        "Check": grpc.unary_unary_rpc_method_handler(check, *codec),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, *codec)})


def _response(phase: Phase) -> health.HealthCheckResponse:
    serving = phase is Phase.READY
    return health.HealthCheckResponse(
        status=health.HealthCheckResponse.SERVING if serving else health.HealthCheckResponse.NOT_SERVING)
