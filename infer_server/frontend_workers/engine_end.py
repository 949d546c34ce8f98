"""Engine-process side of the link to a frontend worker: serves the requests that the worker forwards."""
from __future__ import annotations

import asyncio
import json
import logging
import pickle
from collections.abc import Callable
from functools import lru_cache

from infer_server.endpoints.grpc.context import requests_load_report
from infer_server.endpoints.grpc.infer_reply import InferReply
from infer_server.endpoints.grpc.methods import Methods
from infer_server.endpoints.http.exchange import Exchange, Handler
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse, response_of
from infer_server.endpoints.inflight import LITTLE_BYTES, Inflight, OpenCall
from infer_server.errors import MemoryLimitError
from infer_server.frontend_workers import link
from infer_server.frontend_workers.link import Frame, Link
from infer_server.frontend_workers.settings import WorkerSettings
from infer_server.frontend_workers.streams import ForwardedStreams
from infer_server.protocol.wire import MAX_CACHED_FORMS, MAX_CACHED_HEADER_BYTES

log = logging.getLogger(__name__)

_STREAM_KINDS = (link.STREAM, link.MESSAGE, link.ALL_SENT, link.LEFT_STREAM, link.WRITTEN)


class EngineEnd(Link):
    """Engine-process end of the link to one frontend worker, open while the worker's process lives."""

    def __init__(self, inflight: Inflight, methods: Methods, handle: Handler,
                 ready: Callable[[str], None], gone: Callable[[], None]) -> None:
        """Create the end of a link.

        Parameters
        ----------
        inflight : Inflight
            Counts the bytes of requests and responses.
        methods : Methods
            gRPC calls that are served, ModelInfer without a coroutine.
        handle : Handler
            Answers HTTP requests.
        ready : callable
            Called with "" when the worker listens, or with the reason why it cannot.
        gone : callable
            Called when the worker's process has ended.
        """
        super().__init__()
        assert methods.infer
        self._inflight, self._handle, self._ready, self._gone = inflight, handle, ready, gone
        self._infers, self._load_report = methods.infer, methods.load_report
        self._replies: dict[int, _Reply] = {}               # pending gRPC calls by number
        self._exchanges: dict[int, _Connection] = {}        # pending HTTP requests by number
        self._streams = ForwardedStreams(methods.find, self)
        self._sent_away = asyncio.Event()                   # clients have been sent GOAWAY, or the worker has ended
        self._unread: dict[int, OpenCall] = {}              # responses that clients have not read yet

    def begin(self, settings: WorkerSettings) -> None:
        """Send the settings; the worker then opens its ports."""
        self.send(link.SETTINGS, 0, pickle.dumps(settings))

    async def send_away(self) -> None:
        """Have the worker send GOAWAY to its clients, and wait until it is delivered."""
        self.send(link.SEND_AWAY)
        await self._sent_away.wait()

    def drain(self, answered: bool) -> None:
        """Tell the worker to close its ports and to end. answered: see Listeners.close."""
        self.send(link.DRAIN, int(answered))

    def closed(self, reason: Exception | None) -> None:
        for reply in list(self._replies.values()):
            reply.leave()
        self._streams.leave_all()
        for number in list(self._exchanges):
            self._leave(number)
        for open_call in self._unread.values():
            self._inflight.end(open_call)
        self._unread.clear()
        self._sent_away.set()
        self._gone()

    def received(self, frame: Frame) -> None:
        kind, number = frame.kind, frame.number
        if kind == link.INFER:
            reply = self._replies[number] = _Reply(self, frame)
            self._infers.take(reply, frame.payload, frame.received_ns,
                              None if frame.remaining_secs == link.NEVER else frame.remaining_secs)
        elif kind == link.HTTP:
            self._exchange(frame)
        elif kind == link.LEFT_INFER:
            if left := self._replies.get(number):
                left.leave()
        elif kind == link.LEFT_HTTP:
            self._leave(number)
        elif kind in _STREAM_KINDS:
            self._streams.received(frame)
        elif kind == link.READ:
            if open_call := self._unread.pop(number, None):
                self._inflight.end(open_call)
        elif kind == link.SENT_AWAY:
            self._sent_away.set()
        elif kind == link.LOG:
            log.log(number, "%s", frame.payload.decode())
        else:
            self._ready("" if kind == link.READY else frame.payload.decode())

    def load_report(self) -> bytes:
        """Return the serialised load report; empty if there is none."""
        return self._load_report() if self._load_report else b""

    def forget(self, number: int, open_call: OpenCall | None) -> None:
        """Drop a reply that has ended."""
        del self._replies[number]
        if open_call:
            self._inflight.end(open_call)

    def keep_until_read(self, number: int, call: OpenCall | None, answer_bytes: int) -> int:
        """Keep a large answered call counted until its client has read the response; return the flag of the frame."""
        if call is None:
            return 0
        self._inflight.keep(call, answer_bytes)
        if call.held_bytes <= LITTLE_BYTES:     # smaller responses fit into the buffers of the sockets
            self._inflight.end(call)
            return 0
        self._unread[number] = call
        return link.COUNTED

    # ---- HTTP
    def _exchange(self, frame: Frame) -> None:
        read = _read_cached if len(frame.about) <= MAX_CACHED_HEADER_BYTES else _read
        method, path, version, headers = read(frame.about)
        connection = self._exchanges[frame.number] = _Connection(self, frame.number, frame.peer.decode())
        request = HttpRequest(method, path, headers, frame.payload, frame.received_ns, version)
        try:
            open_call = self._inflight.begin(connection, len(frame.payload))
        except MemoryLimitError as error:
            connection.respond(Exchange(connection, request, OpenCall(connection)), response_of(error))
            return
        exchange = connection.exchange = Exchange(connection, request, open_call)
        try:
            self._handle(exchange)
        except Exception as error:
            exchange.fail(error)

    def _leave(self, number: int) -> None:
        connection = self._exchanges.pop(number, None)
        if connection and (exchange := connection.exchange):
            connection.exchange = None
            self._inflight.end(exchange.open_call)
            exchange.leave()

    def responded(self, number: int, exchange: Exchange, response: HttpResponse) -> None:
        self._forget(number, exchange)
        about = _about(response.status, response.content_type, tuple(response.headers.items()))
        flag = self.keep_until_read(number, exchange.open_call, response.body_bytes)
        self.send(link.RESPONSE | flag, number, *response.body, about=about)

    def ended(self, number: int, exchange: Exchange) -> None:
        self._forget(number, exchange)
        self._inflight.end(exchange.open_call)
        self.send(link.END, number)

    def _forget(self, number: int, exchange: Exchange) -> None:
        del self._exchanges[number]
        exchange.left = None                    # breaks a reference cycle, which would delay freeing the memory


class _Reply(InferReply):
    """The reply to a ModelInfer call that a frontend worker forwards."""
    __slots__ = ("_end", "_number", "_peer", "_about")

    def __init__(self, end: EngineEnd, frame: Frame) -> None:
        super().__init__()
        self._end, self._number, self._peer, self._about = end, frame.number, frame.peer, frame.about

    def respond(self, response: bytes) -> None:
        open_call, self.open_call = self.open_call, None
        flag = self._end.keep_until_read(self._number, open_call, len(response))
        self._end.forget(self._number, None)
        report = self._end.load_report() if self.needs_load_report else b""
        self._end.send(link.ANSWER | flag, self._number, response, about=report)

    def refuse(self, code: int, details: str) -> None:
        self._end.forget(self._number, self.open_call)
        self._end.send(link.FAIL, self._number, details.encode(), about=str(code).encode())

    def leave(self) -> None:
        super().leave()
        self._end.forget(self._number, self.open_call)

    @property
    def needs_load_report(self) -> bool:
        return bool(self._about) and requests_load_report(self.metadata())

    def metadata(self) -> list[tuple[str, str]]:
        metadata: list[tuple[str, str]] = json.loads(self._about) if self._about else []
        return metadata

    # ---- inflight.Client
    def peer(self) -> str:
        return self._peer.decode()

    def disconnect(self) -> None:
        """Do nothing: the worker ends the connection, by its own clock."""


class _Connection:
    """Stand-in for a client's connection, for one HTTP request that a frontend worker forwards."""
    __slots__ = ("_end", "_number", "_peer", "exchange")

    def __init__(self, end: EngineEnd, number: int, peer: str) -> None:
        self._end, self._number, self._peer = end, number, peer
        self.exchange: Exchange | None = None

    def respond(self, exchange: Exchange, response: HttpResponse) -> None:
        self.exchange = None
        self._end.responded(self._number, exchange, response)

    def begin(self, content_type: str, chunked: bool) -> None:
        self._end.send(link.BEGIN, self._number, about=content_type.encode())

    def part(self, piece: bytes) -> None:
        self._end.send(link.PART, self._number, piece)

    def end(self, exchange: Exchange) -> None:
        self.exchange = None
        self._end.ended(self._number, exchange)

    # ---- inflight.Client
    def peer(self) -> str:
        return self._peer

    def disconnect(self) -> None:
        """Do nothing: the worker ends the connection, by its own clock."""


def _read(about: bytes) -> tuple[str, str, str, dict[str, str]]:
    """Return method, path, version and headers of an HTTP request."""
    method, path, version, headers = json.loads(about)
    return method, path, version, headers


_read_cached = lru_cache(MAX_CACHED_FORMS)(_read)  # most requests of a client have equal headers


@lru_cache(MAX_CACHED_FORMS)
def _about(status: int, content_type: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    return json.dumps((int(status), content_type, dict(headers))).encode()
