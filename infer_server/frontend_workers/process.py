"""Frontend worker process: it speaks the protocols with clients, and has no models."""
from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Coroutine
from typing import Any

from infer_server.endpoints.http.reading import PortLimits
from infer_server.frontend_workers import link
from infer_server.frontend_workers.grpc_calls import GrpcCalls
from infer_server.frontend_workers.http_calls import HttpCalls
from infer_server.frontend_workers.settings import WorkerSettings
from infer_server.frontend_workers.worker_end import ToLink, WorkerEnd, WorkerInflight
from infer_server.grpc_ports import grpc_server
from infer_server.listeners import GrpcServer, Listeners
from infer_server.process import raise_descriptor_limit, tune_malloc


class FrontendWorker:
    """Ports and link of a frontend worker. Not thread-safe: belongs to the event loop."""

    def __init__(self) -> None:
        self.end = WorkerEnd(lambda settings: self._do(self._listen(settings)),
                             lambda: self._do(self._send_goaway()),
                             lambda answered: self._do(self._close(answered)))
        self.ended = asyncio.Event()
        self._tasks = set[asyncio.Task[None]]()     # the event loop keeps only weak references to tasks
        self._listeners: Listeners


    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, settings: WorkerSettings) -> None:
        logging.basicConfig(level=settings.log_level, handlers=[ToLink(self.end, asyncio.get_running_loop())],
                            format="%(message)s")           # the engine process adds the time and the level
        inflight = WorkerInflight(settings.max_inflight_bytes, settings.send_timeout_secs, self.end)
        self._listeners = Listeners(PortLimits(settings.max_body_bytes, inflight, settings.max_json_bytes,
                                               settings.min_body_rate, settings.body_grace_secs), shares_ports=True)
        try:
            if address := settings.http:
                self.end.exchanges = calls = HttpCalls(self.end, inflight)
                await self._listeners.listen_http(address.host, address.port, calls, address.tls)
            if address := settings.grpc:
                await self._listeners.listen_grpc(self._grpc(settings, inflight), address.host, address.port,
                                                  address.tls)
        except OSError as error:
            self.end.send(link.FAILED, 0, str(error).encode())
            return
        self.end.send(link.READY)

    def _grpc(self, settings: WorkerSettings, inflight: WorkerInflight) -> GrpcServer:
        self.end.infers = calls = GrpcCalls(self.end, inflight, settings)
        return grpc_server(settings.grpc_front, calls.methods(), inflight, settings.channel, settings.max_message_bytes,
                           settings.min_body_rate, settings.body_grace_secs, shares_port=True)

    async def _send_goaway(self) -> None:
        await self._listeners.send_away()
        self.end.send(link.SENT_AWAY)

    async def _close(self, answered: bool) -> None:
        await self._listeners.close(answered)
        self.ended.set()


async def _serve(connection: socket.socket) -> None:
    worker = FrontendWorker()
    await asyncio.get_running_loop().create_unix_connection(lambda: worker.end, sock=connection)
    await worker.ended.wait()


def main() -> None:
    tune_malloc()
    raise_descriptor_limit()
    work = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        from uvloop import run
    except ImportError:
        asyncio.run(work)
    else:
        run(work)
