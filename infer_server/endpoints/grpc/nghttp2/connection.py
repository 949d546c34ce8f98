"""Connection of a client to the gRPC port: an HTTP/2 connection, in which each stream is a call.

References
----------
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""
from __future__ import annotations

from typing import Any

from infer_server.endpoints.grpc.compression import gzipped
from infer_server.endpoints.grpc.context import peer_of
from infer_server.endpoints.grpc.methods import INFER_PATH, Methods
from infer_server.endpoints.grpc.nghttp2.calls import CoroutineCall, InferCall
from infer_server.endpoints.grpc.nghttp2.head import (
    START,
    START_GZIP,
    SUCCESS,
    UNIMPLEMENTED,
    RequestHead,
    read_head,
    status_headers,
    success_headers,
)
from infer_server.endpoints.http2.connection import WRITE_BYTES, Http2Connection, Sending, Shared
from infer_server.protos.grpc_framing import prefix_of
from infer_server.protos.http2 import Header, NGH2Error


class GrpcConnection(Http2Connection):
    """HTTP/2 connection whose streams are gRPC calls. Not thread-safe: belongs to the event loop."""

    def __init__(self, shared: Shared, methods: Methods) -> None:
        super().__init__(shared)
        self._methods = methods
        self.max_message_bytes = shared.settings.max_message_bytes
        self._headers: tuple[Header, ...] = ()                  # headers of the last call, which _head parses
        self._head = RequestHead(())

    def peer_of(self, name: Any) -> str:
        return peer_of(name)

    def begin(self, stream: int, headers: tuple[Header, ...], ended: bool) -> None:
        if headers == self._headers:
            head = self._head
        else:
            head = read_head(headers)
            self._headers, self._head = headers, head
        if head.http_status or head.code:
            self._refuse_head(stream, head, ended)
            return
        methods = self._methods
        call: InferCall | CoroutineCall
        if methods.infer and head.path == INFER_PATH:
            call = self.streams[stream] = InferCall(self, stream, head, methods.infer)
        elif serve := methods.find(head.path):
            call = self.streams[stream] = CoroutineCall(self, stream, head, serve)
        else:
            self.refuse(stream, UNIMPLEMENTED, "Method not found!", ended)
            return
        if ended:
            call.receive(b"", True)

    def _refuse_head(self, stream: int, head: RequestHead, ended: bool) -> None:
        if head.http_status:
            self.answer_with(stream, ((b":status", b"%d" % head.http_status),), ended)
        else:
            self.refuse(stream, head.code, head.details, ended)

    # ---- calls.Carrier
    def answer(self, stream: int, response: bytes, head: RequestHead) -> None:
        if self._transport is None:
            return
        http2, is_compressed = self._http2, False
        if self._settings.compresses and head.accepts_gzip and (packed := gzipped(response)):
            response, is_compressed = packed, True
        try:
            http2.send_response(stream, START_GZIP if is_compressed else START)
            prefix = prefix_of(len(response), is_compressed)
            if len(response) <= WRITE_BYTES:
                http2.send_data(stream, prefix + response)
            else:                               # without a copy of it
                http2.send_data(stream, prefix)
                http2.send_data(stream, response)
            reports = self._methods.load_report if head.needs_load_report else None
            http2.send_trailers(stream, success_headers(reports()) if reports else SUCCESS)
        except NGH2Error as error:
            self.failed(error)
        self.sending()

    def start(self, stream: int, head: RequestHead) -> None:
        if self._transport:
            with Sending(self):
                self._http2.send_response(stream, START_GZIP if self._settings.compresses and head.accepts_gzip
                                          else START)

    def write_message(self, stream: int, message: bytes, head: RequestHead, call: CoroutineCall) -> bool:
        packed = gzipped(message) if self._settings.compresses and head.accepts_gzip else None
        data = prefix_of(len(packed), True) + packed if packed else prefix_of(len(message)) + message
        return self._transport is None or self.write(stream, data, call)

    def finish(self, stream: int, code: int, details: str, ended: bool) -> None:
        if self._transport:
            with Sending(self):
                self._http2.send_trailers(stream, status_headers(code, details))
                if not ended:
                    self.reset_when_sent(stream)
            self.sending()

    def refuse(self, stream: int, code: int, details: str, ended: bool) -> None:
        self.answer_with(stream, (*START[:2], *status_headers(code, details)), ended)
