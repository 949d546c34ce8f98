"""HTTP port of a frontend worker: forwards complete, decompressed requests with JSON tensors as bytes."""
from __future__ import annotations

import json
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any

from infer_server.endpoints.http.exchange import Exchange
from infer_server.endpoints.http.messages import HttpRequest, HttpResponse
from infer_server.frontend_workers import link
from infer_server.frontend_workers.json_requests import is_worthwhile, with_bytes
from infer_server.frontend_workers.link import Frame
from infer_server.frontend_workers.worker_end import WorkerEnd, WorkerInflight
from infer_server.protocol.json_documents import LARGE_BYTES
from infer_server.workers import run_steps

_CACHED_HEADS = 1024            # number of parsed response heads that are cached


class HttpCalls:
    """Handler of a worker's HTTP port. Not thread-safe: belongs to the event loop."""

    def __init__(self, end: WorkerEnd, inflight: WorkerInflight) -> None:
        self._end, self._inflight = end, inflight
        self._exchanges: dict[int, Exchange] = {}           # pending requests by number

    def __call__(self, exchange: Exchange) -> None:
        if len(exchange.request.body) > LARGE_BYTES and is_worthwhile(exchange.request):
            exchange.answer_later(self._convert(exchange))
            return
        if is_worthwhile(exchange.request):
            exchange.request = run_steps(with_bytes(exchange.request, partial(self._inflight.hold, exchange.open_call)))
        self._send(exchange)

    async def _convert(self, exchange: Exchange) -> None:
        """Convert the tensors of an inference request in steps, and forward it."""
        hold = partial(self._inflight.hold, exchange.open_call)
        exchange.request = await self._inflight.steps.run(exchange.while_present(with_bytes(exchange.request, hold)))
        if not exchange.gone:
            self._send(exchange)

    def _send(self, exchange: Exchange) -> None:
        number, request, client = self._end.next_number(), exchange.request, exchange.open_call.client
        self._exchanges[number] = exchange
        exchange.left = partial(self._leave, number)
        self._end.send(link.HTTP, number, request.body, about=_about(request),
                       peer=client.peer().encode() if client else b"", received_ns=request.received_ns)

    def answered(self, frame: Frame) -> None:
        """Accept a response or a part of one."""
        kind, number = frame.kind & ~link.COUNTED, frame.number
        exchange = self._exchanges.get(number)
        if exchange is None:                                # the client has disconnected
            if kind != frame.kind:
                self._end.read(number)
        elif kind == link.BEGIN:
            exchange.begin(frame.about.decode())
        elif kind == link.PART:
            exchange.part(bytes(frame.payload))
        else:
            self._forget(number)
            if kind == link.END:
                exchange.end()
                return
            if kind != frame.kind:
                self._inflight.set_number(exchange.open_call, number)
            status, content_type, headers = _head_of(frame.about)
            exchange.respond(HttpResponse((frame.payload,) if frame.payload else (), status, content_type, headers))

    def _leave(self, number: int) -> None:
        self._forget(number)
        self._end.send(link.LEFT_HTTP, number)

    def _forget(self, number: int) -> None:
        self._exchanges.pop(number).left = None


def _about(request: HttpRequest) -> bytes:
    return json.dumps((request.method, request.path, request.version, request.headers), ensure_ascii=False).encode()


@lru_cache(_CACHED_HEADS)
def _head_of(about: bytes) -> tuple[HTTPStatus, str, dict[str, Any]]:
    status, content_type, headers = json.loads(about)
    return HTTPStatus(status), content_type, headers
