"""Supervisor of the frontend workers in the engine process: starts, restarts and ends their processes."""
from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from infer_server.endpoints.grpc.methods import Methods
from infer_server.endpoints.http.exchange import Handler
from infer_server.endpoints.inflight import Inflight
from infer_server.errors import RepositoryError
from infer_server.frontend_workers.engine_end import EngineEnd
from infer_server.frontend_workers.settings import WorkerSettings
from infer_server.listeners import SENDING_SECS
from infer_server.process import blocked
from infer_server.workers import in_daemon_thread

log = logging.getLogger(__name__)

_START_SECS = 60.0
_ENDING_SECS = 3 * SENDING_SECS         # time for a worker to send pending responses and to end
_PAUSE_SECS = 1.0                       # minimum interval between two starts of a worker
_SERVER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_CHECK_SECS = 0.02                      # interval between checks whether a process has ended

MakeEnd = Callable[[Callable[[str], None], Callable[[], None]], EngineEnd]      # (ready, gone): see EngineEnd


class FrontendWorkers:
    """Frontend workers of a server. Call start() once, then close() once, on one event loop."""

    def __init__(self, count: int, inflight: Inflight, methods: Methods) -> None:
        """Set the number of workers, the counter of calls in flight, and the gRPC methods that they forward."""
        self._count, self._inflight, self._methods = count, inflight, methods
        self._workers: list[_FrontendWorker] = []

    def processes(self) -> Mapping[str, int]:
        """Return the process IDs of the workers by name."""
        return {worker.name: worker.pid for worker in self._workers if worker.pid}

    async def start(self, settings: WorkerSettings, handle: Handler) -> None:
        """Start the workers; return when all listen. Their ports must be reserved.

        handle: answers HTTP requests. Raises OSError if a worker cannot listen; then all workers are ended.
        """
        try:
            make_end = partial(EngineEnd, self._inflight, self._methods, handle)
            code = _code_on_disk()
            self._workers = [_FrontendWorker(i, make_end, code) for i in range(self._count)]
            await asyncio.gather(*(worker.start(settings) for worker in self._workers))
        except OSError:
            await self.close(answered=False)
            raise

    async def send_away(self) -> None:
        """Send GOAWAY to the workers' clients. See Listeners.send_away."""
        await asyncio.gather(*(worker.send_away() for worker in self._workers))

    async def close(self, answered: bool) -> None:
        """Have the workers send pending responses and end. answered: see Listeners.close."""
        await asyncio.gather(*(worker.close(answered) for worker in self._workers))


class _FrontendWorker:
    """Frontend worker: a process, which is restarted when it ends."""

    def __init__(self, number: int, make_end: MakeEnd, code: bytes) -> None:
        """code: digest of this process's modules; a worker started with other code would not understand the link."""
        self.name = f"front {number}"
        self._make_end, self._code = make_end, code
        self._process: subprocess.Popen[bytes] | None = None
        self._end: EngineEnd
        self._started: asyncio.Future[str]      # "" once it listens, or the reason why it cannot
        self._gone: asyncio.Event               # set when it has ended
        self._watching: asyncio.Task[None] | None = None    # restarts it
        self._closed = False                    # once True, the worker is not restarted

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self, settings: WorkerSettings) -> None:
        """Start the worker and its supervision. Raises OSError if it cannot listen."""
        await self._start(settings)
        if not self._closed:                    # closed if another worker could not start
            self._watching = asyncio.create_task(self._watch(settings))

    async def send_away(self) -> None:
        if self._listens():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._end.send_away(), SENDING_SECS)

    async def close(self, answered: bool) -> None:
        self._closed = True                     # asyncio.wait_for may swallow the cancellation of _watch
        if self._watching:
            self._watching.cancel()
            if self._listens():
                self._end.drain(answered)
                try:
                    await asyncio.wait_for(self._gone.wait(), _ENDING_SECS)
                except TimeoutError:
                    log.warning("%s did not end in %g s, and is killed", self.name, _ENDING_SECS)
        await self._kill()

    async def _start(self, settings: WorkerSettings) -> None:
        loop = asyncio.get_running_loop()
        self._started, self._gone = loop.create_future(), asyncio.Event()
        engine_socket, worker_socket = socket.socketpair()
        try:
            with worker_socket:
                self._process = _start_process(worker_socket.fileno())  # on this thread: takes only a few ms
        except OSError:
            engine_socket.close()
            raise
        self._end = end = self._make_end(self._set_started, self._ended)
        await loop.create_unix_connection(lambda: end, sock=engine_socket)
        end.begin(settings)
        try:
            reason = await asyncio.wait_for(asyncio.shield(self._started), _START_SECS)
        except TimeoutError:
            reason = f"it did not listen within {_START_SECS:g} s"
        if reason:
            raise OSError(reason)

    async def _watch(self, settings: WorkerSettings) -> None:
        while not self._closed:
            began = time.monotonic()
            await self._gone.wait()
            log.error("%s has ended (%s), and is started again", self.name, await self._kill())
            while not self._closed:
                await asyncio.sleep(began + _PAUSE_SECS - time.monotonic())
                began = time.monotonic()
                try:
                    if await in_daemon_thread(_code_on_disk) != self._code:
                        log.error("%s is not started again: the code of infer-server has changed since this server "
                                  "began; restart it", self.name)
                        return
                    await self._start(settings)
                    break
                except (OSError, RepositoryError) as error:     # a lack of descriptors or memory may be temporary
                    log.error("%s: %s", self.name, error)
                    await self._kill()

    async def _kill(self) -> str:
        """Kill the process unless it has ended, and return how it ended as text."""
        process = self._process
        if process is None:
            return "not started"
        process.kill()
        while (status := process.poll()) is None:       # polls, because a thread to wait may not be available
            await asyncio.sleep(_CHECK_SECS)
        return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"

    def _listens(self) -> bool:
        return self._started.done() and not self._started.result() and not self._gone.is_set()

    def _set_started(self, reason: str) -> None:
        if not self._started.done():
            self._started.set_result(reason)

    def _ended(self) -> None:
        self._gone.set()
        self._set_started("its process has ended")


def _start_process(descriptor: int) -> subprocess.Popen[bytes]:
    # Signals go to all processes of a terminal or of a service; the engine process decides when workers end.
    with blocked(_SERVER_SIGNALS):
        return subprocess.Popen([sys.executable, "-P", "-m", "infer_server.frontend_workers", str(descriptor)],
                                pass_fds=[descriptor], stdin=subprocess.DEVNULL)


def _code_on_disk() -> bytes:
    """Return a digest of the server's modules on disk, which a process that starts now would import.

    The version does not suffice: several checkouts may have the same.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()
