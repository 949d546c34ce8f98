"""Routes of KServe's and Triton's HTTP/REST protocol, a line each, with their handlers.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/tree/main/docs/protocol
"""
from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

from infer_server.endpoints.http.exchange import Exchange, Handler
from infer_server.endpoints.http.generate import generate
from infer_server.endpoints.http.infer import infer
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, error_response
from infer_server.endpoints.http.model_pages import ModelPages
from infer_server.endpoints.http.server_pages import ServerPages, status_pages
from infer_server.endpoints.metrics import CONTENT_TYPE, Metrics
from infer_server.endpoints.restrictions import HostCheck, Restrictions
from infer_server.endpoints.service import Service
from infer_server.endpoints.services import InferenceServices
from infer_server.endpoints.status.snapshot import Snapshots
from infer_server.observing.load_report import HEADER
from infer_server.repository.repository import Repository
from infer_server.workers import PeriodicValue, StepRunner

CHANGE = "CHANGE"               # method of a route: a POST that changes the server
Answer = Callable[..., Awaitable[HttpResponse]]     # called with the request and the groups of the path's pattern
_MODEL = r"/v2/models/(?P<model>[^/]+)(/versions/(?P<version>[^/]+))?"
_TRACE = rf"({_MODEL}|/v2)/trace/setting"
_MEMORY = r"/v2/(?P<kind>system|cuda)sharedmemory(/region/(?P<region>[^/]+))?"
_CONTROL = r"/v2/repository(/(?P<repository>[^/]+))?/models/(?P<model>[^/]+)"


def server_routes(service: Service, services: InferenceServices, repository: Repository, restrictions: Restrictions,
                  hosts: HostCheck, snapshots: Snapshots) -> Handler:
    """Return the handler of the HTTP port: inference and all other calls of the protocol.

    hosts: checks calls that change the server. snapshots: data of the status page.
    """
    pages = ModelPages(service.models, services.inflight.steps)
    server = ServerPages(service.memory, service.settings)
    routes = _Routes([
        *(("statistics", "GET", re.escape(path), page) for path, page in status_pages(snapshots).items()),
        ("metadata", "GET", r"/v2/?", pages.server),
        ("health", "GET", r"/v2/health/live", pages.live),
        ("health", "GET", r"/v2/health/ready", pages.ready),
        ("statistics", "GET", r"/v2/models/stats", pages.statistics),
        ("metadata", "GET", _MODEL, pages.metadata),
        ("health", "GET", _MODEL + "/ready", pages.model_ready),
        ("model-config", "GET", _MODEL + "/config", pages.config),
        ("statistics", "GET", _MODEL + "/stats", pages.statistics),
        ("model-repository", "POST", r"/v2/repository(/(?P<repository>[^/]+))?/index", pages.index),
        ("model-repository", CHANGE, _CONTROL + "/load", pages.load),
        ("model-repository", CHANGE, _CONTROL + "/unload", pages.unload),
        ("trace", "GET", _TRACE, server.trace),
        ("trace", CHANGE, _TRACE, server.set_trace),
        ("logging", "GET", r"/v2/logging", server.log),
        ("logging", CHANGE, r"/v2/logging", server.set_log),
        ("shared-memory", "GET", _MEMORY + "/status", server.memory),
        ("shared-memory", CHANGE, _MEMORY + "/register", server.register_memory),
        ("shared-memory", CHANGE, _MEMORY + "/unregister", server.unregister_memory),
    ], restrictions, hosts)
    return _with_inference(services, repository, restrictions, routes)


def _with_inference(services: InferenceServices, repository: Repository, restrictions: Restrictions,
                    routes: Handler) -> Handler:
    """Return a handler that answers inference requests and passes all others to `routes`."""
    def _submit(exchange: Exchange, model: str, version: str, how: str) -> None:
        if exchange.gone:
            return
        if how == "infer":
            infer(exchange, model, version, services, repository.find)
        else:
            generate(exchange, repository.find(model, version), version, services, how == "generate_stream")

    inference_path = re.compile(_MODEL + "/(?P<how>infer|generate|generate_stream)")

    def handle(exchange: Exchange) -> None:
        path = inference_path.fullmatch(exchange.request.path)
        if path is None:
            routes(exchange)
        elif exchange.request.method == "POST":
            restrictions.check("inference", exchange.request.header_bytes)
            if services.load and (form := exchange.request.headers.get(HEADER)):
                exchange.more_headers = partial(services.load.headers, form)
            submit = partial(_submit, exchange, path["model"], path["version"] or "", path["how"])
            if services.on_demand:
                services.on_demand.when_loaded(path["model"], submit, exchange.fail)
            else:
                submit()
        else:
            exchange.respond(_wrong_method("POST"))
    return handle


def metrics_routes(repository: Repository, metrics: Metrics, service: Service, cache_secs: float) -> Handler:
    """Return the handler of the metrics port, which also answers the probes of an orchestrator.

    cache_secs: time for which a rendered page is reused.
    """
    text = PeriodicValue(lambda: metrics.render(repository.models()), cache_secs)

    async def page(_: HttpRequest) -> HttpResponse:
        return HttpResponse(((await text.get()).encode(),), content_type=CONTENT_TYPE)

    probes = ModelPages(service.models, StepRunner())
    return _Routes([("", "GET", r"/metrics", page),
                    ("", "GET", r"/v2/health/live", probes.live),       # while the other ports are not open yet
                    ("", "GET", r"/v2/health/ready", probes.ready)],
                   Restrictions(), HostCheck(), "this port serves /metrics and /v2/health")


class _Routes:
    """Router from requests to handlers; HEAD is answered like GET, without the body."""

    def __init__(self, routes: list[tuple[str, str, str, Answer]], restrictions: Restrictions, hosts: HostCheck,
                 otherwise: str = "") -> None:
        """Create a router.

        Parameters
        ----------
        routes : list of (category, method, pattern, handler)
            The method CHANGE is a POST that changes the server, which `hosts` checks.
        restrictions : Restrictions
        hosts : HostCheck
        otherwise : str
            Error message for other paths.
        """
        self._routes = [(category, method, re.compile(pattern), answer) for category, method, pattern, answer in routes]
        self._restrictions, self._hosts = restrictions, hosts
        self._otherwise = otherwise
        self._tasks = set[asyncio.Task[None]]()

    def __call__(self, exchange: Exchange) -> None:
        request, allowed = exchange.request, set[str]()
        method = "GET" if request.method == "HEAD" else request.method
        for category, accepted, pattern, answer in self._routes:
            if path := pattern.fullmatch(request.path):
                changes, accepted = accepted == CHANGE, "POST" if accepted == CHANGE else accepted
                if accepted == method:
                    self._restrictions.check(category, request.header_bytes)
                    if changes:
                        self._hosts.check(request.headers)
                    self._start(exchange, answer(request, **path.groupdict(default="")))
                    return
                allowed.add(accepted)
        exchange.respond(_wrong_method(*sorted(allowed)) if allowed else error_response(
            HTTPStatus.NOT_FOUND, self._otherwise or f"there is no {request.path}"))

    def _start(self, exchange: Exchange, answering: Awaitable[HttpResponse]) -> None:
        task = asyncio.ensure_future(_answered(exchange, answering))
        self._tasks.add(task)                   # the event loop keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)


async def _answered(exchange: Exchange, answering: Awaitable[HttpResponse]) -> None:
    try:
        exchange.respond(await answering)
    except Exception as error:
        exchange.fail(error)


def _wrong_method(*allowed: str) -> HttpResponse:
    return HttpResponse((b'{"error":"method not allowed"}',), HTTPStatus.METHOD_NOT_ALLOWED,
                        headers={"Allow": ", ".join(allowed)})
