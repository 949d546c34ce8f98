"""Readiness for load balancers and probes: grpc.health.v1, and KServe's GET pages.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md
https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""
from __future__ import annotations

import json
import re
from http import HTTPStatus

import grpc

import protos
from infer_server.endpoints.grpc_errors import answering, parsed
from infer_server.endpoints.http_server import Page, error_page
from infer_server.errors import InvalidRequestError, ServeError, UnknownModelError, UnknownServiceError
from infer_server.lifecycle import Lifecycle
from infer_server.repository.repository import Repository
from infer_server.version import NAME, VERSION
from protos import health

NOT_SERVED = error_page(HTTPStatus.NOT_IMPLEMENTED,
                        "only GET of /v2, /v2/health/{live,ready} and /v2/models/M[/versions/V]/ready is served; "
                        "use gRPC for all else")

_MODEL_READY = re.compile(r"/v2/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?/ready")
_SERVICES = ("", protos.INFERENCE_SERVICE)      # "" is the server as a whole


def health_handlers(lifecycle: Lifecycle) -> grpc.GenericRpcHandler:
    """Check and Watch, over the readiness of the server."""

    async def check(data: bytes, _: grpc.aio.ServicerContext) -> bytes:
        request = parsed(health.HealthCheckRequest, data)
        if request.service not in _SERVICES:
            raise UnknownServiceError(f"unknown service '{request.service}'")
        return _response(lifecycle.ready).SerializeToString()

    async def watch(data: bytes, context: grpc.aio.ServicerContext) -> None:
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


def health_page(path: str, lifecycle: Lifecycle, repository: Repository) -> Page | None:
    """The answer to GET of a path; None: there is no such page."""
    if path == "/v2":
        return Page(json.dumps({"name": NAME, "version": VERSION, "extensions": []}))
    if path == "/v2/health/live":
        return Page()
    if path == "/v2/health/ready":
        return Page(status=HTTPStatus.OK if lifecycle.ready else HTTPStatus.SERVICE_UNAVAILABLE)
    if match := _MODEL_READY.fullmatch(path):
        return _model_ready(repository, match["name"], match["version"] or "")
    return None


def _model_ready(repository: Repository, name: str, version: str) -> Page:
    try:
        repository.find(name, version)
    except UnknownModelError as error:
        return error_page(HTTPStatus.NOT_FOUND, str(error))
    except InvalidRequestError as error:
        return error_page(HTTPStatus.BAD_REQUEST, str(error))
    except ServeError as error:
        return error_page(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
    return Page()
