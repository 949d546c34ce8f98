"""The server as a whole: the endpoints over one repository, and the order in which they come and go."""
from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from engines.files import user_cache
from infer_server.backend import EngineLoader, load_plan
from infer_server.batching.cache import ResponseCache
from infer_server.endpoints.front import Front
from infer_server.endpoints.grpc.connections import disconnect, is_connected, stop_listening
from infer_server.endpoints.grpc.fast import FastServer
from infer_server.endpoints.grpc.infer import GrpcFront
from infer_server.endpoints.grpc.server import GrpcSettings, create_server
from infer_server.endpoints.http.connection import Handler
from infer_server.endpoints.http.reading import Limits
from infer_server.endpoints.http.routes import metrics_routes, server_routes
from infer_server.endpoints.http.server import HttpServer, listen
from infer_server.endpoints.inflight import Inflight
from infer_server.endpoints.memory_service import MemoryService
from infer_server.endpoints.metrics import MetricsSettings
from infer_server.endpoints.restrictions import Restrictions, Secret
from infer_server.endpoints.service import ModelService, Service
from infer_server.endpoints.settings import LogSettings, SettingsService
from infer_server.endpoints.shared_memory import Regions
from infer_server.endpoints.tls import Tls
from infer_server.errors import RepositoryError
from infer_server.lifecycle import Lifecycle, ServerPhase
from infer_server.observing.access_log import AccessLog
from infer_server.observing.custom_metrics import CustomMetrics
from infer_server.observing.tracing import Tracer, TraceSettings
from infer_server.rate_limiter import RateLimiter
from infer_server.repository.building import Compiler
from infer_server.repository.loader import Loader
from infer_server.repository.on_demand import OnDemand
from infer_server.repository.places import LocalFolder, Place
from infer_server.repository.polling import Poller
from infer_server.repository.remote import RemoteFolder, is_remote
from infer_server.repository.repository import Repository
from infer_server.serving import Inferences
from infer_server.version import NAME
from infer_server.workers import in_daemon_thread

log = logging.getLogger(__name__)

_LOOKING_SECS = 0.05            # between two looks whether anybody is left: each at all of the process's descriptors
_TAKING_IN_TURNS = 5            # of the loop, for it to take in connections that the system has accepted
_REFUSING_SECS = 0.25           # for clients that ask again at once to be told, before their connection closes
_SENDING_SECS = 5.0             # for computed answers to reach their clients


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
    poll_secs: float = 0.0                      # between looks at what has changed in the repository; 0: none
    load_models: tuple[str, ...] | None = ()    # under explicit control: at start; None: every one
    strict_readiness: bool = True               # not ready while a model that was to be served has failed
    drain_grace_secs: float = 1.0               # between readiness dropping and refusing what is new
    exit_timeout_secs: float = 30.0             # for what was accepted to be answered
    response_cache_bytes: int = 64 << 20        # of the responses of models that ask for a cache
    max_message_bytes: int = 256 << 20
    max_inflight_bytes: int = 1 << 30           # of requests and answers that are held at a time
    send_timeout_secs: float = 60.0             # for a client to read an answer that it asked for
    allow_client_shm: bool = False              # clients may pass tensors in system shared memory
    grpc_front: str = "grpcio"                  # or "fast", without TLS: see endpoints/grpc/fast.py
    grpc_tls: Tls | None = None
    http_tls: Tls | None = None
    grpc_secrets: Mapping[str, Secret] = field(default_factory=dict)        # by the category of calls that ask for it
    http_secrets: Mapping[str, Secret] = field(default_factory=dict)
    grpc_reflection: bool = False
    access_log: str = ""                        # of access_log.FORMS; "": none
    tracing: TraceSettings | None = None
    metrics: MetricsSettings = MetricsSettings()
    grpc_channel: Mapping[str, int] = field(default_factory=dict)           # see GrpcSettings


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


def address(host: str, port: int) -> str:
    """host:port, the host in brackets if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
                        custom_metrics=self._custom_metrics)
        self.lifecycle = Lifecycle(lambda: not (options.strict_readiness and self.failures()))
        places = places_of(options.model_repositories, options.repository_cache, options.repository_cache_bytes)
        self.repository = Repository(places, loader.load)
        self.repository.watch(self.lifecycle.changed)
        self._poller = Poller(self.repository, places, options.poll_secs) if options.poll_secs else None
        self._unreadable: dict[str, str] = {}   # why there is no repository
        self._inflight = Inflight(options.max_inflight_bytes, options.send_timeout_secs)
        regions = Regions(options.allow_client_shm)
        self.log_settings = LogSettings()
        on_demand = OnDemand(self.repository, options.model_memory_bytes) if options.model_memory_bytes else None
        self._service = Service(ModelService(self.repository, self.lifecycle, options.explicit_control, on_demand,
                                             options.name),
                                MemoryService(regions), SettingsService(self.repository, self.log_settings))
        self._tracer = Tracer(options.tracing) if options.tracing else None
        log_of = AccessLog(options.access_log) if options.access_log else None
        self._front = Front(Inferences(self.repository, log_of, self._tracer), self._inflight, regions, on_demand)
        self._grpc = create_server(
            self._service, GrpcFront(**vars(self._front), disconnect=self._disconnect), self.lifecycle,
            GrpcSettings(options.max_message_bytes, options.grpc_channel, options.grpc_secrets,
                         fast=options.grpc_front == "fast" and options.grpc_tls is None,
                         reflection=options.grpc_reflection))
        self._grpc_port = 0
        self._http: list[HttpServer] = []
        self._loading: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> Ports:
        """Opens the ports, and begins to load models: those that are ready are served while others load.

        Raises OSError for a port that cannot be had.
        """
        options = self._options
        routes = server_routes(self._service, self._front, self.repository, self.lifecycle,
                               Restrictions(options.http_secrets))
        http = await self._listen_http("http", options.http_port, routes, options.http_tls)
        metrics_port = await self._listen_http(
            "metrics", options.metrics_port, metrics_routes(self.repository, options.metrics, self._custom_metrics))
        self._grpc_port = self._listen_grpc()
        if self._grpc_port:
            await self._grpc.start()
        self._loading = asyncio.create_task(self._load())
        return Ports(self._grpc_port, http, metrics_port)

    async def loaded(self) -> None:
        """Waits until the models to be loaded at start are ready, or have failed: see failures()."""
        assert self._loading is not None, "start() comes first"
        await self._loading

    def failures(self) -> dict[str, str]:
        """Why models that were to be served are not."""
        return {**self._unreadable, **self.repository.failures()}

    async def stop(self) -> bool:
        """Drops readiness, answers what was accepted, and closes. False: not all of it within exit_timeout_secs."""
        assert self._loading is not None, "start() comes first"
        self.lifecycle.enter(ServerPhase.DRAINING)
        self._loading.cancel()
        if self._polling:
            self._polling.cancel()
        self._compiler.close()
        await asyncio.sleep(self._options.drain_grace_secs)
        self.lifecycle.enter(ServerPhase.STOPPED)
        # The models go first and gRPC last: what arrives meanwhile is refused with a status that tells clients to go
        # elsewhere. A gRPC server that stops would cancel the calls that it has not handed out yet: before it does,
        # nobody is connected any more.
        answered = True
        try:
            await asyncio.wait_for(self.repository.close(), self._options.exit_timeout_secs)
        except TimeoutError:
            answered = False
            log.error("requests were still executing after %g s; they are given up", self._options.exit_timeout_secs)
        if self._grpc_port:
            stop_listening(self._grpc_port)
        await self._refuse()
        if answered:
            await self._inflight.wait_sent(_SENDING_SECS)
            if self._grpc_port and isinstance(self._grpc, FastServer):
                await self._grpc.wait_sent(_SENDING_SECS)
        if self._grpc_port:
            disconnect(self._grpc_port)
            await self._grpc.stop(0)
        for http in self._http:
            http.close()
        if self._tracer:
            with suppress(TimeoutError):
                await asyncio.wait_for(in_daemon_thread(self._tracer.close), _SENDING_SECS)
        return answered

    async def _refuse(self) -> None:
        """Answers those that ask again at once, for as long as anybody is connected who could."""
        for _ in range(_TAKING_IN_TURNS):
            await asyncio.sleep(0)
        end = time.monotonic() + _REFUSING_SECS
        while time.monotonic() < end and (any(http.is_connected for http in self._http)
                                          or self._grpc_port and is_connected(self._grpc_port)):
            await asyncio.sleep(_LOOKING_SECS)

    def _disconnect(self, peer: str) -> None:
        disconnect(self._grpc_port, peer)

    async def _load(self) -> None:
        chosen = self._options.explicit_control or self._options.model_memory_bytes
        names = self._options.load_models if chosen else None
        try:
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

    def _host(self, what: str) -> str:
        return self._options.hosts.get(what, self._options.host)

    async def _listen_http(self, what: str, port: int, handle: Handler, tls: Tls | None = None) -> int:
        if what in self._options.closed:
            return 0
        try:
            server = await listen(self._host(what), port, handle,
                                  Limits(self._options.max_message_bytes, self._inflight), tls)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise OSError(f"cannot listen on {address(self._host(what), port)}: {reason}") from error
        self._http.append(server)
        return server.port

    def _listen_grpc(self) -> int:
        if "grpc" in self._options.closed:
            return 0
        wanted, tls = address(self._host("grpc"), self._options.grpc_port), self._options.grpc_tls
        try:
            port: int
            if tls:
                assert not isinstance(self._grpc, FastServer)
                port = self._grpc.add_secure_port(wanted, tls.grpc_credentials())
            else:
                port = self._grpc.add_insecure_port(wanted)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {wanted}: the port is taken, or this machine has no such address"
                          ) from error
        return port
