"""Server on a thread of the test's process, with real sockets."""
from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from infer_server.backend import EngineLoader
from infer_server.server import Ports, Server, ServerOptions
from scripts.testing.numpy_engine import TIMEOUT_SECS, load_numpy_engine

T = TypeVar("T")
RunLoop = Callable[[Coroutine[Any, Any, None]], None]       # runs a server on an event loop of its kind
# What serves gRPC, as parameters of tests and of fixtures; and the same in processes of their own.
FRONTS = ("nghttp2", "grpcio")
WORKERS = ("nghttp2, 2 workers", "grpcio, 2 workers")
DEFAULTS: dict[str, Any] = {"drain_grace_secs": 0.0, "page_cache_secs": 0.0}   # where a test says nothing else


class RunningServer:
    def __init__(self, options: ServerOptions, load_engine: EngineLoader = load_numpy_engine,
                 run: RunLoop = uvloop.run) -> None:
        self._options, self._load_engine = options, load_engine
        self._started = threading.Event()
        self._answered = False
        self._log_level = logging.getLogger().level     # which clients may change
        self._thread = threading.Thread(target=lambda: run(self._run()), name="server")
        self.loop: asyncio.AbstractEventLoop
        self.server: Server
        self.ports: Ports

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports.grpc}"

    @property
    def folder(self) -> Path:
        """Return the first model repository."""
        return Path(self._options.model_repositories[0])

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(TIMEOUT_SECS)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT_SECS)

    def stop(self) -> bool:
        """Stop the server; return True if it answered all accepted requests. A second call has no effect."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(TIMEOUT_SECS)
            assert not self._thread.is_alive()
            logging.getLogger().setLevel(self._log_level)
        return self._answered

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = Server(self._options, self._load_engine)
        self.ports = await self.server.start()
        await self.server.loaded()
        self._started.set()
        await self._stop.wait()
        self._answered = await self.server.stop()


def options(repository: Path, **given: Any) -> ServerOptions:
    given = {"model_repositories": (repository,), "cache_dir": repository / ".cache", **DEFAULTS, **given}
    front, _, workers = given.pop("grpc_front", "nghttp2").partition(", ")       # of FRONTS or WORKERS
    return ServerOptions(grpc_port=0, http_port=0, metrics_port=0,
                         **{"grpc_front": front, "workers": int(workers.removesuffix(" workers") or 1), **given})


@contextmanager
def serving(repository: Path, load_engine: EngineLoader = load_numpy_engine, run: RunLoop = uvloop.run,
            **given: Any) -> Iterator[RunningServer]:
    """Run a server on free ports with all models loaded, and stop it at the end."""
    running = RunningServer(options(repository, **given), load_engine, run)
    running.start()
    try:
        yield running
    finally:
        running.stop()
