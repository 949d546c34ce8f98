"""The paths of KServe's and Triton's HTTP/REST protocol, a line each, and what answers them.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/tree/main/docs/protocol
"""
from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from infer_server.endpoints import metrics
from infer_server.endpoints.http.connection import Exchange, Handler
from infer_server.endpoints.http.infer import infer
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, error_response, json_response
from infer_server.endpoints.http.protobuf_json import to_json
from infer_server.endpoints.inflight import Inflight
from infer_server.endpoints.service import Service
from infer_server.errors import InvalidRequestError, NotServedError
from infer_server.repository.repository import Repository
from infer_server.serving import Inferences
from protos import inference

Answer = Callable[..., Awaitable[HttpResponse]]     # of a request, and what its path names
_MODEL = r"/v2/models/(?P<model>[^/]+)(/versions/(?P<version>[^/]+))?"
_CONTROL = r"/v2/repository(/(?P<repository>[^/]+))?/models/(?P<model>[^/]+)"


def server_routes(service: Service, inferences: Inferences, repository: Repository, inflight: Inflight) -> Handler:
    """The HTTP port: inference, and all that is asked of models, the repository and the server."""
    pages = _Pages(service, repository)
    routes = _Routes([
        ("GET", r"/v2/?", pages.server),
        ("GET", r"/v2/health/live", pages.live),
        ("GET", r"/v2/health/ready", pages.ready),
        ("GET", r"/v2/models/stats", pages.statistics),
        ("GET", _MODEL, pages.metadata),
        ("GET", _MODEL + "/ready", pages.model_ready),
        ("GET", _MODEL + "/config", pages.config),
        ("GET", _MODEL + "/stats", pages.statistics),
        ("POST", r"/v2/repository(/(?P<repository>[^/]+))?/index", pages.index),
        ("POST", _CONTROL + "/load", pages.load),
        ("POST", _CONTROL + "/unload", pages.unload),
        ("", _MODEL + "/(generate|generate_stream)", _not_served("generation")),
        ("", _MODEL + "/trace/setting|/v2/trace/setting", _not_served("tracing")),
        ("", r"/v2/logging", _not_served("log settings")),
        ("", r"/v2/(systemsharedmemory|cudasharedmemory)(/.*)?", _not_served("shared memory")),
    ])
    inference_path = re.compile(_MODEL + "/infer")

    def handle(exchange: Exchange) -> None:
        path = inference_path.fullmatch(exchange.request.path)
        if path is None:
            routes(exchange)
        elif exchange.request.method == "POST":
            infer(exchange, path["model"], path["version"] or "", inferences, inflight)
        else:
            exchange.respond(_wrong_method("POST"))
    return handle


def metrics_routes(repository: Repository) -> Handler:
    """The metrics port."""
    async def page(_: HttpRequest) -> HttpResponse:
        return HttpResponse((metrics.render(repository.models()).encode(),), content_type=metrics.CONTENT_TYPE)

    return _Routes([("GET", r"/metrics", page)], "this port serves /metrics")


class _Routes:
    """Finds what answers a request; HEAD is answered as GET is, without the body."""

    def __init__(self, routes: list[tuple[str, str, Answer]], otherwise: str = "") -> None:
        """routes: method ("": any), pattern of the path, and what answers. otherwise: said of a path that is none."""
        self._routes = [(method, re.compile(pattern), answer) for method, pattern, answer in routes]
        self._otherwise = otherwise
        self._tasks = set[asyncio.Task[None]]()

    def __call__(self, exchange: Exchange) -> None:
        request, allowed = exchange.request, set[str]()
        method = "GET" if request.method == "HEAD" else request.method
        for wanted, pattern, answer in self._routes:
            if path := pattern.fullmatch(request.path):
                if wanted in ("", method):
                    self._start(exchange, answer(request, **path.groupdict(default="")))
                    return
                allowed.add(wanted)
        exchange.respond(_wrong_method(*sorted(allowed)) if allowed else error_response(
            HTTPStatus.NOT_FOUND, self._otherwise or f"there is no {request.path}"))

    def _start(self, exchange: Exchange, answering: Awaitable[HttpResponse]) -> None:
        task = asyncio.ensure_future(_answered(exchange, answering))
        self._tasks.add(task)                   # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)


async def _answered(exchange: Exchange, answering: Awaitable[HttpResponse]) -> None:
    try:
        exchange.respond(await answering)
    except Exception as error:
        exchange.fail(error)


class _Pages:
    """What answers each path, by the service that gRPC has too."""

    def __init__(self, service: Service, repository: Repository) -> None:
        self._service, self._repository = service, repository

    async def server(self, _: HttpRequest) -> HttpResponse:
        return json_response(to_json(await self._service.ServerMetadata(inference.ServerMetadataRequest())))

    async def live(self, _: HttpRequest) -> HttpResponse:
        return HttpResponse()

    async def ready(self, _: HttpRequest) -> HttpResponse:
        ready = (await self._service.ServerReady(inference.ServerReadyRequest())).ready
        return HttpResponse(status=HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def model_ready(self, _: HttpRequest, model: str, version: str) -> HttpResponse:
        self._repository.find(model, version)
        return HttpResponse()

    async def metadata(self, _: HttpRequest, model: str, version: str) -> HttpResponse:
        request = inference.ModelMetadataRequest(name=model, version=version)
        return json_response(to_json(await self._service.ModelMetadata(request)))

    async def config(self, _: HttpRequest, model: str, version: str) -> HttpResponse:
        request = inference.ModelConfigRequest(name=model, version=version)
        return json_response(to_json(await self._service.ModelConfig(request))["config"])

    async def statistics(self, _: HttpRequest, model: str = "", version: str = "") -> HttpResponse:
        request = inference.ModelStatisticsRequest(name=model, version=version)
        return json_response(to_json(await self._service.ModelStatistics(request)))

    async def index(self, request: HttpRequest, repository: str) -> HttpResponse:
        asked = inference.RepositoryIndexRequest(repository_name=repository, ready=_ready_only(request))
        return json_response([{name: value for name, value in to_json(entry).items() if value or name == "name"}
                              for entry in (await self._service.RepositoryIndex(asked)).models])

    async def load(self, request: HttpRequest, repository: str, model: str) -> HttpResponse:
        asked = inference.RepositoryModelLoadRequest(repository_name=repository, model_name=model)
        _set_parameters(asked.parameters, request)
        await self._service.RepositoryModelLoad(asked)
        return HttpResponse()

    async def unload(self, request: HttpRequest, repository: str, model: str) -> HttpResponse:
        asked = inference.RepositoryModelUnloadRequest(repository_name=repository, model_name=model)
        _set_parameters(asked.parameters, request)
        await self._service.RepositoryModelUnload(asked)
        return HttpResponse()


def _set_parameters(parameters: Any, request: HttpRequest) -> None:
    """The member "parameters" of a load or unload, as the messages have them."""
    for name, value in _member(request, "parameters", dict, {}).items():
        if isinstance(value, bool):
            parameters[name].bool_param = value
        elif isinstance(value, int):
            parameters[name].int64_param = value
        elif isinstance(value, str):
            parameters[name].string_param = value
        else:
            raise InvalidRequestError(f"parameter '{name}': expected text, a number or a truth")


def _ready_only(request: HttpRequest) -> bool:
    return bool(_member(request, "ready", bool, False))


def _member(request: HttpRequest, name: str, kind: type, default: Any) -> Any:
    """A member of the body's JSON object, which may be left out."""
    body = request.json()
    value = body.get(name, default) if isinstance(body, dict) else None
    if type(value) is not kind:
        raise InvalidRequestError(f"expected a JSON object whose '{name}' is of type {kind.__name__}")
    return value


def _not_served(what: str) -> Answer:
    async def refuse(*_: Any, **__: Any) -> HttpResponse:
        raise NotServedError(f"{what} is not served by this server")
    return refuse


def _wrong_method(*allowed: str) -> HttpResponse:
    return HttpResponse((b'{"error":"method not allowed"}',), HTTPStatus.METHOD_NOT_ALLOWED,
                        headers={"Allow": ", ".join(allowed)})
