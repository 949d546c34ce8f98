"""Engine-process side of the gRPC calls, except ModelInfer, that frontend workers forward message by message."""
from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import grpc

from infer_server.endpoints.grpc.context import Serve
from infer_server.endpoints.grpc.errors import described
from infer_server.endpoints.inflight import LITTLE_BYTES
from infer_server.errors import NotServedError
from infer_server.frontend_workers import link
from infer_server.frontend_workers.link import Frame, Link


class ForwardedStreams:
    """Calls of one frontend worker. Not thread-safe: belongs to the event loop."""

    def __init__(self, find: Callable[[str], Serve | None], end: Link) -> None:
        """Create the calls; `find` is that of Methods."""
        self._find, self._end = find, end
        self._open: dict[int, tuple[_ForwardedContext, asyncio.Task[None]]] = {}

    def received(self, frame: Frame) -> None:
        if frame.kind == link.STREAM:
            context = _ForwardedContext(frame, self._end)
            task = asyncio.ensure_future(self._serve(frame.number, frame.payload.decode(), context))
            self._open[frame.number] = context, task
            task.add_done_callback(lambda _: self._open.pop(frame.number))      # also if it is cancelled at once
        elif pending := self._open.get(frame.number):   # else the call has ended
            context, task = pending
            if frame.kind == link.LEFT_STREAM:
                task.cancel()
            else:
                context.received(frame)

    def leave_all(self) -> None:
        for _, task in self._open.values():
            task.cancel()

    async def _serve(self, number: int, path: str, context: _ForwardedContext) -> None:
        code, details = grpc.StatusCode.OK, ""
        try:
            if (serve := self._find(path)) is None:
                raise NotServedError("Method not found!")
            await serve(context)
        except asyncio.CancelledError:
            return
        except Exception as error:
            code, details = described(error, context.peer())
        self._end.send(link.ENDED, number, details.encode(), about=str(code.value[0]).encode())


class _ForwardedContext:
    """The CallContext of a call that a frontend worker forwards."""

    def __init__(self, begun: Frame, end: Link) -> None:
        self._number, self._end, self._peer = begun.number, end, begun.peer.decode()
        self._metadata: list[tuple[str, str]] = [(name, value) for name, value in json.loads(begun.about)]
        self._ends_ns = begun.received_ns + int(begun.remaining_secs * 1e9) if begun.remaining_secs != link.NEVER else 0
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()      # None: the client has sent all
        self._unwritten = 0                                                 # responses not yet written to the client
        self._written = asyncio.Event()

    def received(self, frame: Frame) -> None:
        if frame.kind == link.WRITTEN:
            self._unwritten -= 1
            self._written.set()
        else:
            self._requests.put_nowait(frame.payload if frame.kind == link.MESSAGE else None)

    def peer(self) -> str:
        return self._peer

    def metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return max(0.0, (self._ends_ns - time.monotonic_ns()) / 1e9) if self._ends_ns else None

    async def read(self) -> bytes | None:
        data = await self._requests.get()
        if data is not None:
            self._end.send(link.CONSUMED, self._number)
        return data

    def disconnect(self) -> None:
        """Do nothing: the worker ends the connection, by its own clock."""

    def when_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError("ModelInfer alone needs it, which is forwarded in a frame of its own")

    async def write(self, message: bytes) -> None:
        """Send a response; wait while the window is full, or until the client has read it if it is large."""
        self._unwritten += 1
        self._end.send(link.STREAMED, self._number, message)
        while self._unwritten > (0 if len(message) > LITTLE_BYTES else link.WINDOW):
            self._written.clear()
            await self._written.wait()
