"""Server: the endpoints over one repository, and the order in which they start and stop."""
from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from infer_server.backend import EngineLoader, load_plan
from infer_server.batching.cache import ResponseCache
from infer_server.config.kinds import ModelKind
from infer_server.endpoints.grpc.in_process import InProcessGrpc
from infer_server.endpoints.grpc.service.methods import HEADER_PREFIX, service_methods
from infer_server.endpoints.http.reading import PortLimits
from infer_server.endpoints.http.routes import metrics_routes, server_routes
from infer_server.endpoints.inflight import Inflight
from infer_server.endpoints.memory_service import MemoryService
from infer_server.endpoints.metrics import Metrics, MetricsSettings
from infer_server.endpoints.restrictions import HostCheck, Restrictions, Secret
from infer_server.endpoints.service import ModelService, Service
from infer_server.endpoints.services import InferenceServices
from infer_server.endpoints.settings import LogSettings, SettingsService
from infer_server.endpoints.shared_memory import Regions
from infer_server.endpoints.status.history import History
from infer_server.endpoints.status.snapshot import Snapshots
from infer_server.endpoints.status.state import ServerState
from infer_server.endpoints.tls import ServerTls
from infer_server.engines.files import user_cache
from infer_server.errors import FetchError, RepositoryError
from infer_server.frontend_workers.ports import ReservedPorts
from infer_server.frontend_workers.settings import ListenAddress, WorkerSettings
from infer_server.frontend_workers.supervisor import FrontendWorkers
from infer_server.grpc_ports import NGHTTP2, grpc_server
from infer_server.lifecycle import Lifecycle, ServerPhase
from infer_server.listeners import SENDING_SECS, Listeners
from infer_server.observing.access_log import AccessLog
from infer_server.observing.custom_metrics import CustomMetrics
from infer_server.observing.load_report import LoadReports
from infer_server.observing.spans import SpanSettings, SpanTracer
from infer_server.observing.trace_files import TraceFiles
from infer_server.observing.trace_settings import TraceSettings
from infer_server.observing.traces import Tracer
from infer_server.protocol import redaction
from infer_server.protos.version import NAME
from infer_server.rate_limiter import RateLimiter
from infer_server.repository.building import Compiler
from infer_server.repository.kinds.local import TensorMemory
from infer_server.repository.loader import Loader
from infer_server.repository.on_demand import OnDemand
from infer_server.repository.polling import Poller, load_unfetched, load_when_reachable
from infer_server.repository.remote import RemoteFolder, is_remote
from infer_server.repository.repository import LOADS, Repository
from infer_server.repository.roots import LocalFolder, RepositoryRoot
from infer_server.serving import Inferences
from infer_server.workers import in_daemon_thread, wait_until

log = logging.getLogger(__name__)

_WINDOWS = 32           # number of windows of decoupled steps that fit into max_inflight_bytes; see TensorMemory


@dataclass(frozen=True)
class ServerOptions:
    """Options of the command line. A port of 0 is any free one."""
    model_repositories: tuple[Path | str, ...]  # folders, or addresses such as s3://bucket/models
    repository_cache: Path | None = None        # folder of the copies of remote repositories; None: the user's cache
    repository_cache_bytes: int = 20 << 30      # limit of the copies of each remote repository
    cache_dir: Path | None = None               # folder of the engine cache; None: the user's
    plan_store: str = ""                        # address of the plan store behind it; "": none
    plan_store_key: Path | None = None          # file with the secret that signs its plans
    host: str = "127.0.0.1"
    hosts: Mapping[str, str] = field(default_factory=dict)      # hosts of "grpc", "http", "metrics"; default `host`
    closed: frozenset[str] = frozenset()        # those of "grpc", "http", "metrics" without a port
    grpc_port: int = 8001
    http_port: int = 8000
    metrics_port: int = 8002
    threads: int = 1                            # threads of one instance
    name: str = NAME                            # name in the server's metadata
    cores: int = 1                              # cores for the instances of a model without an instance count
    rate_limit: Mapping[str, int] | None = None     # amounts of resources; None: rate_limiters have no effect
    kind_gpu: str = "cpu"                       # KIND_GPU without a GPU: "cpu" or "refuse"
    kind_auto: str = "cpu"                      # device of a model.onnx with KIND_AUTO groups: "cpu" or "gpu"
    explicit_control: bool = False              # True if clients load and unload models
    model_memory_bytes: int = 0                 # memory limit of models loaded on demand; 0: all are loaded at start
    config_name: str = ""                       # name of the custom configuration to use instead of config.pbtxt
    poll_secs: float = 0.0                      # interval of polling the repository; 0: none
    retry_secs: float = 15.0                    # interval of attempts to read unreachable remote storage
    listen_when_ready: bool = False             # True: gRPC and HTTP open after the initial models are loaded
    load_models: tuple[str, ...] | None = ()    # models to load at start under explicit control; None: all
    load_threads: int = LOADS                   # number of parallel loads
    strict_readiness: bool = True               # not ready while a model has failed to load
    drain_grace_secs: float = 1.0               # time from reporting not ready until new requests are refused
    exit_timeout_secs: float = 30.0             # time for accepted requests to be answered
    response_cache_bytes: int = 64 << 20        # size of the response cache
    max_message_bytes: int = 256 << 20          # limit of a gRPC message
    max_body_bytes: int = 256 << 20             # limit of an HTTP body
    max_inflight_bytes: int = 1 << 30           # limit of the requests and responses in memory
    max_json_bytes: int = 64 << 20              # limit of the JSON of an HTTP request
    min_body_rate: int = 500                    # minimum rate of an HTTP body in bytes per second; 0: none
    body_grace_secs: float = 10.0               # period over which the rate is averaged
    send_timeout_secs: float = 60.0             # time for a client to read a response
    allow_client_shm: bool = False              # True if clients may register system shared memory
    workers: int = 1                            # frontend worker processes; 1: none, this process does it all
    grpc_front: str = NGHTTP2                   # library that serves gRPC: "nghttp2" or "grpcio"
    grpc_tls: ServerTls | None = None
    http_tls: ServerTls | None = None
    grpc_secrets: Mapping[str, Secret] = field(default_factory=dict)        # secrets by category of calls
    http_secrets: Mapping[str, Secret] = field(default_factory=dict)
    grpc_reflection: bool = False
    access_log: str = ""                        # one of access_log.FORMS; "" for none
    tracing: SpanSettings | TraceSettings | None = None
    metrics: MetricsSettings = MetricsSettings()
    grpc_channel: Mapping[str, int] = field(default_factory=dict)           # gRPC channel arguments by name
    forwarded: Mapping[str, re.Pattern[str]] = field(default_factory=dict)  # see Inferences
    allowed_hosts: tuple[str, ...] = ()         # additional host names of this server; see HostCheck
    page_cache_secs: float = 1.0                # time for which a page of metrics or status is reused


@dataclass(frozen=True)
class Ports:
    """Numbers of the open ports; 0 if there is none."""
    grpc: int
    http: int
    metrics: int


def repository_roots(repositories: Iterable[Path | str], store: Path | None, max_bytes: int) -> list[RepositoryRoot]:
    """Return the repositories, local or remote. Raises RepositoryError if a package for an address is missing."""
    store = store or user_cache() / "models"
    return [RemoteFolder(str(each), store, max_bytes) if is_remote(str(each)) else LocalFolder(Path(each))
            for each in repositories]


def _tracer(settings: SpanSettings | TraceSettings) -> Tracer:
    return SpanTracer(settings) if isinstance(settings, SpanSettings) else TraceFiles(settings)


class Server:
    """Inference server. Call start() once, then stop() once, on one event loop."""

    def __init__(self, options: ServerOptions, load_engine: EngineLoader = load_plan) -> None:
        self._options = options
        self._compiler = Compiler(options.cache_dir, options.plan_store, options.plan_store_key)
        self._custom_metrics = CustomMetrics()
        self.lifecycle = self._make_lifecycle()
        self._roots = repository_roots(options.model_repositories, options.repository_cache,
                                       options.repository_cache_bytes)
        loader = self._make_loader(load_engine)
        self.repository = Repository(self._roots, loader.load, options.config_name, options.load_threads)
        self.repository.is_listed = False
        self.repository.watch(self.lifecycle.changed)
        self._poller = Poller(self.repository, self._roots, options.poll_secs) if options.poll_secs else None
        self._unreadable: dict[str, str] = {}   # reason why the repository cannot be read
        self._retries_storage = False           # True while unreachable remote storage is retried
        self._inflight = Inflight(options.max_inflight_bytes, options.send_timeout_secs)
        self._inflight.watch_limit(self.lifecycle.changed)
        self._listeners = Listeners(PortLimits(options.max_body_bytes, self._inflight, options.max_json_bytes,
                                               options.min_body_rate, options.body_grace_secs),
                                    shares_ports=options.listen_when_ready)
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
        self._workers: FrontendWorkers | None = None
        self._state = ServerState(self.repository, self.lifecycle, self._inflight, options.max_inflight_bytes,
                                  self._worker_processes, self._compiler.durations)
        self._services = InferenceServices(
            inferences, self._inflight, regions, on_demand, options.max_message_bytes, options.max_json_bytes,
            LoadReports(self._state.load_totals, self._state.cpu_secs, options.cores))
        restrictions = Restrictions(options.grpc_secrets, HEADER_PREFIX)
        self._methods = service_methods(self._service, self._services, self.lifecycle, restrictions,
                                        options.grpc_reflection)
        self.grpc = InProcessGrpc(self._methods, options.max_message_bytes)     # calls without a port
        if options.workers > 1:
            self._workers = FrontendWorkers(options.workers, self._inflight, self._methods)
        self._reserved, self._is_open = ReservedPorts(), not options.listen_when_ready
        self._grpc, self._http = self._address("grpc"), self._address("http")
        self._loading: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._history = History(self.repository.models)
        redaction.register([*(root.path for root in self._roots), *filter(None, [options.cache_dir])])

    def _make_loader(self, load_engine: EngineLoader) -> Loader:
        options = self._options
        if load_engine is load_plan and options.cache_dir:
            load_engine = partial(load_plan, cache=options.cache_dir)
        return Loader(asyncio.get_running_loop(), lambda name, version: self.repository.find(name, version),
                      lambda: self._service.models, self._compiler,
                      ResponseCache(options.response_cache_bytes), options.threads, load_engine,
                      options.cores, options.kind_gpu, options.kind_auto,
                      None if options.rate_limit is None else RateLimiter(options.rate_limit),
                      custom_metrics=self._custom_metrics, memory=TensorMemory(
                          lambda size: self._inflight.hold_separately(size), options.max_inflight_bytes // _WINDOWS))

    def _make_lifecycle(self) -> Lifecycle:
        return Lifecycle(lambda: not (self._options.strict_readiness and self.failures()),
                         lambda: not self._without_repository(), lambda: not self._inflight.is_near_limit,
                         lambda: self._retries_storage)

    async def start(self) -> Ports:
        """Open the ports and begin to load models.

        Ready models are served while others load, unless `listen_when_ready`: then the ports of gRPC and HTTP are bound
        here, which shows that they are free, and refuse connections until the models are loaded.

        Raises
        ------
        OSError
            A port cannot be opened.
        """
        options = self._options
        hosts = HostCheck([*options.allowed_hosts, self._host("http")])
        self._routes = server_routes(
            self._service, self._services, self.repository, Restrictions(options.http_secrets), hosts,
            Snapshots(self._state, self._history, options.workers, options.page_cache_secs))
        metrics = Metrics(options.metrics, custom=self._custom_metrics, workers=self._worker_processes,
                          state=self._state.gauges)
        with self.lifecycle.startup.phase("listening"):
            metrics_port = 0
            if address := self._address("metrics"):
                metrics_port = await self._listeners.listen_http(address.host, address.port, metrics_routes(
                    self.repository, metrics, self._service, options.page_cache_secs))
            try:
                if self._workers or options.listen_when_ready:
                    self._grpc, self._http = (
                        each and self._reserved.reserve(each) for each in (self._grpc, self._http))
                grpc, http = (each.port if each else 0 for each in (self._grpc, self._http))
                if not options.listen_when_ready:
                    grpc, http = await self._listen()
            except OSError:
                self._reserved.close()
                raise
        self._loading = asyncio.create_task(self._load())
        return Ports(grpc, http, metrics_port)

    async def _listen(self) -> tuple[int, int]:
        """Open the ports of gRPC and HTTP, by the frontend workers if there are any; return their numbers.

        Raises OSError if a port cannot be opened.
        """
        options, grpc, http = self._options, self._grpc, self._http
        if self._workers:
            await self._workers.start(self._frontend_settings(), self._routes)
            return grpc.port if grpc else 0, http.port if http else 0
        http_port = await self._listeners.listen_http(http.host, http.port, self._routes, http.tls) if http else 0
        if not grpc:
            return 0, http_port
        server = grpc_server(options.grpc_front, self._methods, self._inflight, options.grpc_channel,
                             options.max_message_bytes, options.min_body_rate, options.body_grace_secs,
                             shares_port=options.listen_when_ready)
        return await self._listeners.listen_grpc(server, grpc.host, grpc.port, grpc.tls), http_port

    def _worker_processes(self) -> Mapping[str, int]:
        """Return the process ids of the frontend workers by name."""
        return self._workers.processes() if self._workers else {}

    async def loaded(self) -> None:
        """Wait until the models to load at start are ready or have failed; see failures().

        Raises OSError if a port cannot be opened after that (`listen_when_ready`).
        """
        assert self._loading is not None, "start() comes first"
        await self._loading

    def failures(self) -> dict[str, str]:
        """Return the reasons why models are not served, by name."""
        return {**self._without_repository(), **self.repository.failures()}

    def _without_repository(self) -> dict[str, str]:
        """Return the reason why the repository cannot be read, until a poll succeeds."""
        return {} if self._poller and self._poller.has_polled and not self._retries_storage else self._unreadable

    async def stop(self) -> bool:
        """Drop readiness, answer the accepted requests, and close.

        Returns
        -------
        bool
            False if some requests were not answered within exit_timeout_secs.
        """
        assert self._loading is not None, "start() comes first"
        self.lifecycle.enter(ServerPhase.DRAINING)
        self._loading.cancel()
        self._history.close()
        if self._polling:
            self._polling.cancel()
        self._compiler.close()
        await asyncio.sleep(self._options.drain_grace_secs)
        await self._listeners.send_away()
        if self._workers:
            await self._workers.send_away()
        self.lifecycle.enter(ServerPhase.STOPPED)
        answered = True                 # models are drained first: requests are refused while the ports close
        self._services.inferences.close()
        try:
            await asyncio.wait_for(self._drain(), self._options.exit_timeout_secs)
        except TimeoutError:
            answered = False
            log.error("requests were still executing after %g s and are dropped (--exit-timeout-secs)",
                      self._options.exit_timeout_secs)
        if self._workers:
            if answered:
                await self._inflight.wait_sent(SENDING_SECS)        # streams, to the frontend workers
            await self._workers.close(answered)
        await self._listeners.close(answered)
        self._reserved.close()
        if self._tracer:
            with suppress(TimeoutError):
                await asyncio.wait_for(in_daemon_thread(self._tracer.close), SENDING_SECS)
        for root in self._roots:
            root.close()
        return answered

    async def _drain(self) -> None:
        """Close the models after ensembles and Python models, which call other models, have no requests left.

        That wait takes at most half of the exit timeout, so that the models have the rest to drain.
        """
        callers = [model for model in self.repository.models() if model.config.kind is not ModelKind.ENGINE]
        await wait_until(lambda: not any(model.is_busy for model in callers), self._options.exit_timeout_secs / 2)
        await self.repository.close()

    async def _load(self) -> None:
        """Load the initial models, open the ports if they wait for that, and begin to poll the repository."""
        try:
            with self.lifecycle.startup.phase("loading"):
                await self._load_chosen()
        except RepositoryError as error:        # the repository cannot be read
            self._unreadable["model repository"] = str(error)
            self._retries_storage = isinstance(error, FetchError)
            log.error("%s", error)
        if not self._retries_storage:
            await self._open()
        if self.lifecycle.phase is ServerPhase.STARTING:
            self.lifecycle.enter(ServerPhase.READY)
        self._polling = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        """Load the models that unreachable storage delayed, then poll the repositories if that is enabled."""
        secs = self._options.poll_secs or self._options.retry_secs
        if self._retries_storage or not all(root.is_reachable for root in self._roots):
            await load_when_reachable(self._roots, secs, self._load_late)
        await (self._poller.run() if self._poller else load_unfetched(self.repository, secs))

    async def _load_chosen(self) -> None:
        """Load the initial models. Raises RepositoryError if the repository cannot be read."""
        if self._poller:
            await self._poller.begin()
        chosen = self._options.explicit_control or self._options.model_memory_bytes
        await self.repository.load_all(self._options.load_models if chosen else None)

    async def _load_late(self) -> None:
        """Load the initial models once remote storage is reachable. Raises RepositoryError if it is not."""
        await self._load_chosen()
        self._unreadable.clear()
        self._retries_storage = False
        await self._open()
        self.lifecycle.changed()
        log.info("the initial models are loaded" if not self.failures() else "not all models could be loaded")

    async def _open(self) -> None:
        """Open the ports if that has waited for models."""
        if not self._is_open:
            with self.lifecycle.startup.phase("listening"):
                await self._listen()
            self._is_open = True

    def _frontend_settings(self) -> WorkerSettings:
        options = self._options
        return WorkerSettings(
            self._grpc, self._http, options.max_message_bytes, options.max_body_bytes, options.max_inflight_bytes,
            options.send_timeout_secs,
            max_json_bytes=options.max_json_bytes, min_body_rate=options.min_body_rate,
            body_grace_secs=options.body_grace_secs, grpc_front=options.grpc_front,
            forwards_metadata=bool(self._tracer or "inference" in options.grpc_secrets or "gRPC" in options.forwarded),
            reflection=options.grpc_reflection, channel=options.grpc_channel, log_level=log.getEffectiveLevel())

    def _host(self, endpoint: str) -> str:
        return self._options.hosts.get(endpoint, self._options.host)

    def _address(self, endpoint: str) -> ListenAddress | None:
        """Return the address of the port of "grpc", "http" or "metrics"; None if it is closed."""
        options = self._options
        port, tls = {"grpc": (options.grpc_port, options.grpc_tls), "http": (options.http_port, options.http_tls),
                     "metrics": (options.metrics_port, None)}[endpoint]
        return None if endpoint in options.closed else ListenAddress(self._host(endpoint), port, tls)
