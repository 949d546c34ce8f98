"""Health checks of load balancers and probes: grpc.health.v1.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""
from __future__ import annotations

from collections.abc import Mapping

from infer_server import protos
from infer_server.endpoints.grpc.context import CallContext, Check, Serve, unary
from infer_server.endpoints.grpc.errors import parsed
from infer_server.errors import MalformedMessageError, UnknownServiceError
from infer_server.lifecycle import Lifecycle
from infer_server.protos import health

_SERVICES = ("", protos.INFERENCE_SERVICE)      # "" is the server as a whole


def health_methods(lifecycle: Lifecycle, may: Check) -> Mapping[str, Serve]:
    """Return Check and Watch by path, which report readiness to clients that `may` admits."""

    async def check(data: bytes, _: CallContext) -> bytes:
        request = parsed(health.HealthCheckRequest, data)
        if request.service not in _SERVICES:
            raise UnknownServiceError(f"unknown service '{request.service}'")
        return _response(lifecycle.ready).SerializeToString()

    async def watch(context: CallContext) -> None:
        data = await context.read()
        may(context)
        if data is None:
            raise MalformedMessageError("the call has no message")
        request = parsed(health.HealthCheckRequest, data)
        last = None
        async for ready in lifecycle.readiness():      # ends when the server stops, so that no watcher holds it up
            response = _response(ready) if request.service in _SERVICES else health.HealthCheckResponse(
                status=health.HealthCheckResponse.SERVICE_UNKNOWN)
            if response != last:
                await context.write(response.SerializeToString())
            last = response

    return {f"/{protos.HEALTH_SERVICE}/Check": unary(check, may), f"/{protos.HEALTH_SERVICE}/Watch": watch}


def _response(ready: bool) -> health.HealthCheckResponse:
    return health.HealthCheckResponse(
        status=health.HealthCheckResponse.SERVING if ready else health.HealthCheckResponse.NOT_SERVING)
