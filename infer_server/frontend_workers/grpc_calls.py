"""gRPC port of a frontend worker: forwards ModelInfer in a frame over the link, other calls message by message."""
from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from infer_server import protos
from infer_server.endpoints.grpc.context import CallClient, CallContext, Serve
from infer_server.endpoints.grpc.errors import GrpcStatusError
from infer_server.endpoints.grpc.infer_reply import InferReply
from infer_server.endpoints.grpc.methods import INFER_PATH, Methods, awaiting
from infer_server.endpoints.inflight import Inflight, OpenCall
from infer_server.errors import MemoryLimitError
from infer_server.frontend_workers import link
from infer_server.frontend_workers.link import Frame
from infer_server.frontend_workers.settings import WorkerSettings
from infer_server.frontend_workers.worker_end import WorkerEnd, WorkerInflight

log = logging.getLogger(__name__)

_PATHS = {f"/{service}/{method.name}" for service in (protos.INFERENCE_SERVICE, protos.HEALTH_SERVICE)
          for method in protos.methods(service)}
_REFLECTION = "/grpc.reflection."


def _encoded(metadata: Iterable[tuple[str, Any]]) -> bytes:
    """Encode the text metadata of a call for the engine process."""
    return json.dumps([pair for pair in metadata if isinstance(pair[1], str)]).encode()


class GrpcCalls:
    """The calls of a frontend worker's gRPC port. Belongs to the event loop."""

    def __init__(self, end: WorkerEnd, inflight: WorkerInflight, settings: WorkerSettings) -> None:
        self._end, self._inflight = end, inflight
        self._forwards_metadata, self._reflection = settings.forwards_metadata, settings.reflection
        self._max_bytes = settings.max_message_bytes
        self._replies: dict[int, InferReply] = {}               # pending ModelInfer calls by number
        self._streams: dict[int, _Stream] = {}
        self._load_report = b""                                 # the last that came with a response

    def methods(self) -> Methods:
        return Methods(self._find, self, lambda: self._load_report)

    def _find(self, path: str) -> Serve | None:
        if path == INFER_PATH:
            return awaiting(self, self._inflight, self._max_bytes)
        is_served = path in _PATHS or self._reflection and path.startswith(_REFLECTION)
        return partial(self._stream, path) if is_served else None

    # ---- methods.TakesInfer
    def take(self, reply: InferReply, data: bytes, received_ns: int, remaining_secs: float | None) -> None:
        number = self._end.next_number()
        try:
            reply.open_call = reply.open_call or self._inflight.begin(reply, len(data))
        except MemoryLimitError as error:
            reply.fail(error)
            return
        self._replies[number] = reply
        reply.submitted = _Forwarded(self._end, self._replies, number)
        forwards_metadata = self._forwards_metadata or reply.needs_load_report
        self._end.send(link.INFER, number, data, about=_encoded(reply.metadata()) if forwards_metadata else b"",
                       peer=reply.peer().encode(), received_ns=received_ns,
                       remaining_secs=link.NEVER if remaining_secs is None else remaining_secs)

    async def _stream(self, path: str, context: CallContext) -> None:
        stream = _Stream(self._end, path, context, self._inflight)
        self._streams[stream.number] = stream
        context.when_done(stream.is_sent)
        try:
            code, details = await stream.serve()
        except TimeoutError:
            log.warning("%s does not read the responses of its call, which is ended", context.peer())
            context.disconnect()
            return
        finally:
            del self._streams[stream.number]
        if code:
            raise GrpcStatusError(code, details)

    # ---- worker_end.GrpcReceiver
    def answered(self, frame: Frame, is_counted: bool) -> None:
        reply = self._replies.pop(frame.number, None)
        if reply is None or reply.open_call is None:        # the client has disconnected
            if is_counted:
                self._end.read(frame.number)
            return
        if is_counted:
            self._inflight.set_number(reply.open_call, frame.number)
        if frame.about:
            self._load_report = bytes(frame.about)
        reply.send(bytes(frame.payload))

    def failed(self, number: int, code: int, details: str) -> None:
        if reply := self._replies.pop(number, None):
            reply.submitted = None
            reply.refuse(code, details)

    def streamed(self, frame: Frame) -> None:
        if stream := self._streams.get(frame.number):       # else the client has disconnected
            stream.received(frame)


class _Forwarded(NamedTuple):
    """ModelInfer call that waits for its response."""
    end: WorkerEnd
    replies: dict[int, InferReply]
    number: int

    def cancel(self) -> None:
        if self.replies.pop(self.number, None):
            self.end.send(link.LEFT_INFER, self.number)


class _Stream:
    """gRPC call that a worker forwards message by message."""

    def __init__(self, end: WorkerEnd, path: str, context: CallContext, inflight: Inflight) -> None:
        self._end, self._path, self._context, self.number = end, path, context, end.next_number()
        self._inflight, self._client = inflight, CallClient(context)
        self._unconsumed: deque[int] = deque()                  # sizes of forwarded requests not yet consumed
        self._consumed = asyncio.Event()                        # set when one has been consumed
        self._responses: asyncio.Queue[Frame] = asyncio.Queue()
        self._unsent: OpenCall | None = None                    # set while responses or the status are to be sent

    async def serve(self) -> tuple[int, str]:
        """Serve the call and return its status. Raises TimeoutError if the client does not read."""
        context, remaining_secs = self._context, self._context.time_remaining()
        self._end.send(link.STREAM, self.number, self._path.encode(), about=_encoded(context.metadata()),
                       peer=context.peer().encode(), received_ns=time.monotonic_ns(),
                       remaining_secs=link.NEVER if remaining_secs is None else remaining_secs)
        reading = asyncio.ensure_future(self._read_all())
        try:
            while (frame := await self._responses.get()).kind == link.STREAMED:
                async with asyncio.timeout(self._inflight.send_timeout_secs):
                    await context.write(bytes(frame.payload))
                self._end.send(link.WRITTEN, self.number)
                if self._responses.empty():
                    self.is_sent()
        except BaseException:
            self._end.send(link.LEFT_STREAM, self.number)
            raise
        finally:
            reading.cancel()
        return int(frame.about), frame.payload.decode()

    async def _read_all(self) -> None:
        """Forward requests within the window; beyond it, gRPC's flow control holds back the client."""
        while (data := await self._context.read()) is not None:
            self._end.send(link.MESSAGE, self.number, data)
            self._unconsumed.append(len(data))
            while len(self._unconsumed) >= link.WINDOW or sum(self._unconsumed) >= link.WINDOW_BYTES:
                self._consumed.clear()
                await self._consumed.wait()
        self._end.send(link.ALL_SENT, self.number)

    def received(self, frame: Frame) -> None:
        if frame.kind == link.CONSUMED:
            self._unconsumed.popleft()
            self._consumed.set()
        else:
            self._responses.put_nowait(frame)
            self._unsent = self._unsent or self._inflight.begin_uncounted(self._client)

    def is_sent(self) -> None:
        """Note that all responses so far are sent, or that the client has disconnected: the ports may close."""
        if self._unsent:
            self._inflight.end(self._unsent)
            self._unsent = None
