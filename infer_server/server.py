"""The server as a whole: the endpoints over one repository, and the order in which they come and go."""
from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from engines.files import user_cache
from infer_server.backend import EngineLoader, load_plan
from infer_server.batching.cache import ResponseCache
from infer_server.config.kinds import Kind
from infer_server.endpoints.front import Front
from infer_server.endpoints.grpc.grpcio.server import Behind, GrpcioServer
from infer_server.endpoints.grpc.methods import Methods
from infer_server.endpoints.grpc.service.methods import HEADER_PREFIX, service_methods
from infer_server.endpoints.http.exchange import Handler
from infer_server.endpoints.http.reading import Limits
from infer_server.endpoints.http.routes import metrics_routes, server_routes
from infer_server.endpoints.inflight import Inflight
from infer_server.endpoints.memory_service import MemoryService
from infer_server.endpoints.metrics import Metrics, MetricsSettings
from infer_server.endpoints.restrictions import HostCheck, Restrictions, Secret
from infer_server.endpoints.service import ModelService, Service
from infer_server.endpoints.settings import LogSettings, SettingsService
from infer_server.endpoints.shared_memory import Regions
from infer_server.endpoints.status.history import History
from infer_server.endpoints.status.snapshot import Snapshots
from infer_server.endpoints.status.state import ServerState
from infer_server.endpoints.tls import Tls
from infer_server.errors import RepositoryError
from infer_server.fronts.fronts import Fronts
from infer_server.fronts.settings import Door, FrontSettings
from infer_server.grpc_ports import NGHTTP2, grpc_server
from infer_server.lifecycle import Lifecycle, ServerPhase
from infer_server.listeners import SENDING_SECS, Listeners
from infer_server.observing.access_log import AccessLog
from infer_server.observing.custom_metrics import CustomMetrics
from infer_server.observing.spans import SpanSettings, SpanTracer
from infer_server.observing.trace_files import TraceFiles
from infer_server.observing.trace_settings import TraceSettings
from infer_server.observing.traces import Tracer
from infer_server.protocol import redaction
from infer_server.rate_limiter import RateLimiter
from infer_server.repository.building import Compiler
from infer_server.repository.kinds.local import TensorMemory
from infer_server.repository.loader import Loader
from infer_server.repository.on_demand import OnDemand
from infer_server.repository.places import LocalFolder, Place
from infer_server.repository.polling import Poller
from infer_server.repository.remote import RemoteFolder, is_remote
from infer_server.repository.repository import LOADS, Repository
from infer_server.serving import Inferences
from infer_server.workers import in_daemon_thread, wait_until
from protos.version import NAME

log = logging.getLogger(__name__)

_WINDOWS = 32           # that fit into max_inflight_bytes: see TensorMemory


@dataclass(frozen=True)
class ServerOptions:
    """What the command line decides. A port of 0 is any free one."""
    model_repositories: tuple[Path | str, ...]  # folders, and addresses of others: s3://bucket/models
    repository_cache: Path | None = None        # where models of addresses are copied to; None: the user's cache
    repository_cache_bytes: int = 20 << 30      # of the copies of an address
    cache_dir: Path | None = None               # engines built from ONNX files; None: the user's engine cache
    host: str = "127.0.0.1"
    hosts: Mapping[str, str] = field(default_factory=dict)      # of "grpc", "http", "metrics", where not `host`
    closed: frozenset[str] = frozenset()        # those of them that have no port
    grpc_port: int = 8001
    http_port: int = 8000
    metrics_port: int = 8002
    threads: int = 1                            # for one batch of one instance
    name: str = NAME                            # that the server's metadata give
    cores: int = 1                              # for the instances of a model that does not say how many it has
    rate_limit: Mapping[str, int] | None = None     # the resources that there are; None: rate_limiters do not count
    kind_gpu: str = "cpu"                       # instances of KIND_GPU are served on the CPU, or "refuse"
    kind_auto: str = "cpu"                      # of a model.onnx, instances that leave the kind open; or "gpu"
    explicit_control: bool = False              # models are loaded and unloaded by clients
    model_memory_bytes: int = 0                 # of models, which are loaded on demand; 0: they are loaded at start
    config_name: str = ""                       # of the configuration of a model that goes before its config.pbtxt
    poll_secs: float = 0.0                      # between looks at what has changed in the repository; 0: none
    load_models: tuple[str, ...] | None = ()    # under explicit control: at start; None: every one
    load_threads: int = LOADS                   # models that are loaded at a time
    strict_readiness: bool = True               # not ready while a model that was to be served has failed
    drain_grace_secs: float = 1.0               # between readiness dropping and refusing what is new
    exit_timeout_secs: float = 30.0             # for what was accepted to be answered
    response_cache_bytes: int = 64 << 20        # of the responses of models that ask for a cache
    max_message_bytes: int = 256 << 20         # over gRPC
    max_body_bytes: int = 256 << 20            # over HTTP
    max_inflight_bytes: int = 1 << 30           # of requests and answers that are held at a time
    max_json_bytes: int = 64 << 20              # of the JSON of a request over HTTP
    min_body_rate: int = 500                    # bytes per second of a request's body over HTTP; 0: any
    body_grace_secs: float = 10.0               # that the rate is an average over
    send_timeout_secs: float = 60.0             # for a client to read an answer that it asked for
    allow_client_shm: bool = False              # clients may pass tensors in system shared memory
    workers: int = 1                            # processes that read and answer; 1: this one does
    grpc_front: str = NGHTTP2                   # or "grpcio": the library that serves gRPC
    grpc_tls: Tls | None = None
    http_tls: Tls | None = None
    grpc_secrets: Mapping[str, Secret] = field(default_factory=dict)        # by the category of calls that ask for it
    http_secrets: Mapping[str, Secret] = field(default_factory=dict)
    grpc_reflection: bool = False
    access_log: str = ""                        # of access_log.FORMS; "": none
    tracing: SpanSettings | TraceSettings | None = None
    metrics: MetricsSettings = MetricsSettings()
    grpc_channel: Mapping[str, int] = field(default_factory=dict)           # by the names of gRPC's C core
    forwarded: Mapping[str, re.Pattern[str]] = field(default_factory=dict)  # see Inferences
    allowed_hosts: tuple[str, ...] = ()         # host names of this server beside its own; see HostCheck
    page_cache_secs: float = 1.0                # how long a page of metrics or of the status is given to all who ask


@dataclass(frozen=True)
class Ports:
    """0: there is none."""
    grpc: int
    http: int
    metrics: int


def places_of(repositories: Iterable[Path | str], store: Path | None, most_bytes: int) -> list[Place]:
    """The places of models, by folder or by address. Raises RepositoryError: an address cannot be read here."""
    store = store or user_cache() / "models"
    return [RemoteFolder(str(each), store, most_bytes) if is_remote(str(each)) else LocalFolder(Path(each))
            for each in repositories]


def _tracer(settings: SpanSettings | TraceSettings) -> Tracer:
    return SpanTracer(settings) if isinstance(settings, SpanSettings) else TraceFiles(settings)


class Server:
    """start() once, then stop() once, on one event loop."""

    def __init__(self, options: ServerOptions, load_engine: EngineLoader = load_plan) -> None:
        self._options = options
        self._compiler = Compiler(options.cache_dir)
        if load_engine is load_plan and options.cache_dir:
            load_engine = partial(load_plan, cache=options.cache_dir)
        self._custom_metrics = CustomMetrics()
        loader = Loader(asyncio.get_running_loop(), lambda name, version: self.repository.find(name, version),
                        lambda: self._service.models, self._compiler,
                        ResponseCache(options.response_cache_bytes), options.threads, load_engine,
                        options.cores, options.kind_gpu, options.kind_auto,
                        None if options.rate_limit is None else RateLimiter(options.rate_limit),
                        custom_metrics=self._custom_metrics, memory=TensorMemory(
                            lambda size: self._inflight.lend(size), options.max_inflight_bytes // _WINDOWS))
        self.lifecycle = Lifecycle(lambda: not (options.strict_readiness and self.failures()),
                                   lambda: not self._without_repository(), lambda: not self._inflight.is_spent)
        self._places = places_of(options.model_repositories, options.repository_cache, options.repository_cache_bytes)
        self.repository = Repository(self._places, loader.load, options.config_name, options.load_threads)
        self.repository.watch(self.lifecycle.changed)
        self._poller = Poller(self.repository, self._places, options.poll_secs) if options.poll_secs else None
        self._unreadable: dict[str, str] = {}   # why there is no repository
        self._inflight = Inflight(options.max_inflight_bytes, options.send_timeout_secs)
        self._inflight.watch_spent(self.lifecycle.changed)
        self._listeners = Listeners(Limits(options.max_body_bytes, self._inflight, options.max_json_bytes,
                                           options.min_body_rate, options.body_grace_secs))
        regions = Regions(options.allow_client_shm)
        self.log_settings = LogSettings()
        self._tracer = _tracer(options.tracing) if options.tracing else None
        on_demand = OnDemand(self.repository, options.model_memory_bytes) if options.model_memory_bytes else None
        self._service = Service(ModelService(self.repository, self.lifecycle, options.explicit_control, on_demand,
                                             options.name),
                                MemoryService(regions), SettingsService(
                                    self.repository, self.log_settings, self._tracer or TraceFiles(TraceSettings())))
        log_of = AccessLog(options.access_log) if options.access_log else None
        inferences = Inferences(self.repository, log_of, self._tracer, options.forwarded)
        self._front = Front(inferences, self._inflight, regions, on_demand, options.max_message_bytes,
                            options.max_json_bytes)
        restrictions = Restrictions(options.grpc_secrets, HEADER_PREFIX)
        self._methods = service_methods(self._service, self._front, self.lifecycle, restrictions,
                                        options.grpc_reflection)
        self._fronts = Fronts(
            options.workers, Behind(GrpcioServer(self._methods, self._inflight, options.max_message_bytes, {})),
            self._front, restrictions) if options.workers > 1 else None
        self._loading: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._state = ServerState(self.repository, self.lifecycle, self._inflight, options.max_inflight_bytes,
                                  self._front_processes)
        self._history = History(self.repository.models)
        redaction.register([*(place.path for place in self._places), *filter(None, [options.cache_dir])])

    async def start(self) -> Ports:
        """Opens the ports, and begins to load models: those that are ready are served while others load.

        Raises OSError for a port that cannot be had.
        """
        options = self._options
        hosts = HostCheck([*options.allowed_hosts, self._host("http")])
        routes = server_routes(
            self._service, self._front, self.repository, Restrictions(options.http_secrets), hosts,
            Snapshots(self._state, self._history, options.workers, options.page_cache_secs))
        metrics = Metrics(options.metrics, custom=self._custom_metrics, fronts=self._front_processes,
                          state=self._state.gauges)
        with self.lifecycle.startup.phase("listening"):
            metrics_port = await self._listen_http("metrics", options.metrics_port, metrics_routes(
                self.repository, metrics, options.page_cache_secs))
            if self._fronts:
                grpc, http = await self._fronts.start(self._of_fronts(), routes)
            else:
                http = await self._listen_http("http", options.http_port, routes, options.http_tls)
                grpc = 0 if "grpc" in options.closed else await self._listen_grpc(self._methods)
        self._loading = asyncio.create_task(self._load())
        return Ports(grpc, http, metrics_port)

    def _front_processes(self) -> Mapping[str, int]:
        """Return the process ids of the frontend workers by name."""
        return self._fronts.processes() if self._fronts else {}

    async def loaded(self) -> None:
        """Waits until the models to be loaded at start are ready, or have failed: see failures()."""
        assert self._loading is not None, "start() comes first"
        await self._loading

    def failures(self) -> dict[str, str]:
        """Why models that were to be served are not."""
        return {**self._without_repository(), **self.repository.failures()}

    def _without_repository(self) -> dict[str, str]:
        """Why there is nothing to serve, until a poll could read it."""
        return {} if self._poller and self._poller.has_looked else self._unreadable

    async def stop(self) -> bool:
        """Drops readiness, answers what was accepted, and closes. False: not all of it within exit_timeout_secs."""
        assert self._loading is not None, "start() comes first"
        self.lifecycle.enter(ServerPhase.DRAINING)
        self._loading.cancel()
        self._history.close()
        if self._polling:
            self._polling.cancel()
        self._compiler.close()
        await asyncio.sleep(self._options.drain_grace_secs)
        await self._listeners.send_away()
        if self._fronts:
            await self._fronts.send_away()
        self.lifecycle.enter(ServerPhase.STOPPED)
        answered = True                 # the models go first: what arrives while the ports close is refused
        self._front.inferences.close()
        try:
            await asyncio.wait_for(self._drain(), self._options.exit_timeout_secs)
        except TimeoutError:
            answered = False
            log.error("requests were still executing after %g s; they are given up", self._options.exit_timeout_secs)
        if self._fronts:
            if answered:
                await self._inflight.wait_sent(SENDING_SECS)        # streams, to the fronts that hand them on
            await self._fronts.close(answered)
        await self._listeners.close(answered)
        if self._tracer:
            with suppress(TimeoutError):
                await asyncio.wait_for(in_daemon_thread(self._tracer.close), SENDING_SECS)
        for place in self._places:
            place.close()
        return answered

    async def _drain(self) -> None:
        """Closes the models, once ensembles and Python models have no requests left: these may yet ask any other model.
        That is waited for at most half of the exit timeout, so that the models have the rest to drain in."""
        callers = [model for model in self.repository.models() if model.config.kind is not Kind.ENGINE]
        await wait_until(lambda: not any(model.is_busy for model in callers), self._options.exit_timeout_secs / 2)
        await self.repository.close()

    async def _load(self) -> None:
        chosen = self._options.explicit_control or self._options.model_memory_bytes
        names = self._options.load_models if chosen else None
        try:
            with self.lifecycle.startup.phase("loading"):
                if self._poller:
                    await self._poller.begin()
                await self.repository.load_all(names)
        except RepositoryError as error:        # the folder itself: clients can still ask what is there
            self._unreadable["model repository"] = str(error)
            log.error("%s", error)
        if self.lifecycle.phase is ServerPhase.STARTING:
            self.lifecycle.enter(ServerPhase.READY)
        if self._poller:
            self._polling = asyncio.create_task(self._poller.run())

    async def _listen_grpc(self, methods: Methods) -> int:
        options = self._options
        server = grpc_server(options.grpc_front, methods, self._inflight, options.grpc_channel,
                             options.max_message_bytes, options.min_body_rate, options.body_grace_secs)
        return await self._listeners.listen_grpc(server, self._host("grpc"), options.grpc_port, options.grpc_tls)

    def _of_fronts(self) -> FrontSettings:
        options = self._options

        def door(what: str, port: int, tls: Tls | None) -> Door | None:
            return None if what in options.closed else Door(self._host(what), port, tls)

        return FrontSettings(
            door("grpc", options.grpc_port, options.grpc_tls), door("http", options.http_port, options.http_tls), "",
            options.max_message_bytes, options.max_body_bytes, options.max_inflight_bytes, options.send_timeout_secs,
            max_json_bytes=options.max_json_bytes, min_body_rate=options.min_body_rate,
            body_grace_secs=options.body_grace_secs, grpc_front=options.grpc_front,
            tells_metadata=bool(self._tracer or "inference" in options.grpc_secrets or "gRPC" in options.forwarded),
            reflection=options.grpc_reflection, channel=options.grpc_channel, log_level=log.getEffectiveLevel())

    def _host(self, what: str) -> str:
        return self._options.hosts.get(what, self._options.host)

    async def _listen_http(self, what: str, port: int, handle: Handler, tls: Tls | None = None) -> int:
        return 0 if what in self._options.closed else await self._listeners.listen_http(
            self._host(what), port, handle, tls)
