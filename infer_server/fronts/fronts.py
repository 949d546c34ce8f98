"""The fronts of a server, as its engines' process has them: started, started again when one ends, and ended."""
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
from dataclasses import replace
from functools import partial
from pathlib import Path

from infer_server.endpoints.front import Front
from infer_server.endpoints.grpc.grpcio.server import Behind
from infer_server.endpoints.http.exchange import Handler
from infer_server.endpoints.restrictions import Restrictions
from infer_server.errors import RepositoryError
from infer_server.fronts.engine_end import EngineEnd
from infer_server.fronts.ports import Reserved
from infer_server.fronts.settings import Door, FrontSettings
from infer_server.listeners import SENDING_SECS
from infer_server.process import blocked
from infer_server.workers import in_daemon_thread

log = logging.getLogger(__name__)

_START_SECS = 60.0
_ENDING_SECS = 3 * SENDING_SECS         # for a front to send what was answered, and to end
_PAUSE_SECS = 1.0                       # between two starts of a front, at least
_FOR_THE_SERVER = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOKING_SECS = 0.02                    # between two looks whether a process has ended

MakeEnd = Callable[[Callable[[str], None], Callable[[], None]], EngineEnd]      # of what it tells: see EngineEnd


class Fronts:
    """start() once, then close() once, on one event loop."""

    def __init__(self, count: int, behind: Behind, front: Front, restrictions: Restrictions) -> None:
        """behind: serves all of gRPC but ModelInfer. restrictions: of gRPC."""
        self._count, self._behind, self._front, self._restrictions = count, behind, front, restrictions
        self._reserved: list[Reserved] = []
        self._fronts: list[_Front] = []

    def processes(self) -> Mapping[str, int]:
        """Their names, and the numbers of their processes."""
        return {front.name: front.pid for front in self._fronts if front.pid}

    async def start(self, settings: FrontSettings, handle: Handler) -> tuple[int, int]:
        """Returns the ports of gRPC and HTTP when all fronts listen on them. handle: answers what comes over HTTP.
        Raises OSError: a port cannot be had, and none is."""
        try:
            grpc, http = self._reserve(settings.grpc), self._reserve(settings.http)
            settings = replace(settings, grpc=grpc, http=http, others=await self._behind.start())
            make_end = partial(EngineEnd, self._front, self._restrictions, handle)
            code = _code_on_disk()
            self._fronts = [_Front(i, make_end, code) for i in range(self._count)]
            await asyncio.gather(*(front.start(settings) for front in self._fronts))
        except OSError:
            await self.close(answered=False)
            raise
        return grpc.port if grpc else 0, http.port if http else 0

    async def send_away(self) -> None:
        """Have clients of gRPC send their next calls to other servers. See Listeners.send_away."""
        await asyncio.gather(*(front.send_away() for front in self._fronts))

    async def close(self, answered: bool) -> None:
        """Has the fronts send what was answered, and end. answered: see Listeners.close."""
        await asyncio.gather(*(front.close(answered) for front in self._fronts))
        await self._behind.stop()
        for reserved in self._reserved:
            reserved.close()

    def _reserve(self, door: Door | None) -> Door | None:
        """The same with its port, which is any free one if it was 0."""
        if door is None:
            return None
        if door.tls:
            door.tls.context()          # says what is wrong with the files
        self._reserved.append(reserved := Reserved(door.host, door.port))
        return replace(door, port=reserved.port)


class _Front:
    """A process, and the next one when it has ended."""

    def __init__(self, number: int, make_end: MakeEnd, code: bytes) -> None:
        """code: of this process; a front of another would not understand what it is told."""
        self.name = f"front {number}"
        self._make_end, self._code = make_end, code
        self._process: subprocess.Popen[bytes] | None = None
        self._end: EngineEnd
        self._told: asyncio.Future[str]         # "" once it listens, or why it does not
        self._gone: asyncio.Event               # set when it has ended
        self._watching: asyncio.Task[None] | None = None    # while it is to listen
        self._closed = False                    # nothing more is started

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self, settings: FrontSettings) -> None:
        """Raises OSError: it cannot listen."""
        await self._start(settings)
        if not self._closed:                    # as it is when another front could not start
            self._watching = asyncio.create_task(self._watch(settings))

    async def send_away(self) -> None:
        if self._listens():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._end.send_away(), SENDING_SECS)

    async def close(self, answered: bool) -> None:
        self._closed = True                     # asyncio.wait_for, if it has its result, does not tell who is cancelled
        if self._watching:
            self._watching.cancel()
            if self._listens():
                self._end.drain(answered)
                try:
                    await asyncio.wait_for(self._gone.wait(), _ENDING_SECS)
                except TimeoutError:
                    log.warning("%s did not end in %g s, and is killed", self.name, _ENDING_SECS)
        await self._kill()

    async def _start(self, settings: FrontSettings) -> None:
        loop = asyncio.get_running_loop()
        self._told, self._gone = loop.create_future(), asyncio.Event()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _start_process(theirs.fileno())     # a few ms, in which nobody may close this end
        except OSError:
            ours.close()
            raise
        self._end = end = self._make_end(self._tell, self._ended)
        await loop.create_unix_connection(lambda: end, sock=ours)
        end.begin(settings)
        try:
            reason = await asyncio.wait_for(asyncio.shield(self._told), _START_SECS)
        except TimeoutError:
            reason = f"it did not listen within {_START_SECS:g} s"
        if reason:
            raise OSError(reason)

    async def _watch(self, settings: FrontSettings) -> None:
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
                except (OSError, RepositoryError) as error:     # no descriptors, memory, threads: for a moment, perhaps
                    log.error("%s: %s", self.name, error)
                    await self._kill()

    async def _kill(self) -> str:
        """Ends the process, if it has not ended, and says how it did."""
        process = self._process
        if process is None:
            return "not started"
        process.kill()
        while (status := process.poll()) is None:       # no thread waits for that: there may be none
            await asyncio.sleep(_LOOKING_SECS)
        return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"

    def _listens(self) -> bool:
        return self._told.done() and not self._told.result() and not self._gone.is_set()

    def _tell(self, reason: str) -> None:
        if not self._told.done():
            self._told.set_result(reason)

    def _ended(self) -> None:
        self._gone.set()
        self._tell("its process has ended")


def _start_process(descriptor: int) -> subprocess.Popen[bytes]:
    # Signals go to all processes of a terminal or of a service; this one tells frontend workers when to end.
    with blocked(_FOR_THE_SERVER):
        return subprocess.Popen([sys.executable, "-P", "-m", "infer_server.fronts.process", str(descriptor)],
                                pass_fds=[descriptor], stdin=subprocess.DEVNULL)


def _code_on_disk() -> bytes:
    """A digest of the server's modules as a process that starts now would import them. (The version says less: not
    every checkout has another.)"""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()
