"""Engine-process side of ModelStreamInfer calls that frontend workers forward."""
from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import grpc

from infer_server.endpoints.front import InferenceServices
from infer_server.endpoints.grpc.context import CallContext
from infer_server.endpoints.grpc.errors import described
from infer_server.endpoints.grpc.service.stream import infer_stream
from infer_server.endpoints.inflight import LITTLE_BYTES
from infer_server.endpoints.restrictions import OF_CALL, Restrictions
from infer_server.fronts import link
from infer_server.fronts.link import Frame, Link


class ForwardedStreams:
    """Streams of one frontend worker. Not thread-safe: belongs to the event loop."""

    def __init__(self, services: InferenceServices, restrictions: Restrictions, end: Link) -> None:
        self._services, self._restrictions, self._end = services, restrictions, end
        self._open: dict[int, tuple[_ForwardedContext, asyncio.Task[None]]] = {}

    def received(self, frame: Frame) -> None:
        if frame.kind == link.STREAM:
            context = _ForwardedContext(frame, self._end)
            task = asyncio.ensure_future(self._serve(frame.number, context))
            self._open[frame.number] = context, task
            task.add_done_callback(lambda _: self._open.pop(frame.number))      # also if it is cancelled at once
        elif found := self._open.get(frame.number):     # else the stream has ended
            context, task = found
            if frame.kind == link.LEFT_STREAM:
                task.cancel()
            else:
                context.received(frame)

    def leave_all(self) -> None:
        for _, task in self._open.values():
            task.cancel()

    async def _serve(self, number: int, context: _ForwardedContext) -> None:
        code, details = grpc.StatusCode.OK, ""
        try:
            await infer_stream(self._services, self._check, context)
        except asyncio.CancelledError:
            return
        except Exception as error:
            code, details = described(error, context.peer())
        self._end.send(link.ENDED, number, details.encode(), about=str(code.value[0]).encode())


    def _check(self, context: CallContext) -> None:
        self._restrictions.check(OF_CALL["ModelStreamInfer"], dict(context.metadata()).get)


class _ForwardedContext:
    """The CallContext of a stream that a frontend worker hands on."""

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
            self._end.send(link.TAKEN, self._number)
        return data

    def disconnect(self) -> None:
        """Do nothing: the worker ends the connection, by its own clock."""

    def when_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError("streams count their answers one by one")

    async def write(self, message: bytes) -> None:
        """Send a response; wait while the window is full, or until the client has read it if it is large."""
        self._unwritten += 1
        self._end.send(link.STREAMED, self._number, message)
        while self._unwritten > (0 if len(message) > LITTLE_BYTES else link.WINDOW):
            self._written.clear()
            await self._written.wait()
