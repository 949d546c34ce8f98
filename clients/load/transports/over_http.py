"""Requests over HTTP/1.1 with tensors as bytes behind the JSON, both ways; a connection for each that is in flight.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import quote

from google.protobuf import json_format

from infer_server.clients.calls import Response
from infer_server.clients.channels import StatusError
from infer_server.clients.codec import datatype_of, encode
from infer_server.clients.errors import ResponseError, error_of
from infer_server.clients.load.transports.http_connection import Answer, HttpClientConnection, connect
from infer_server.clients.load.transports.transport import (
    MAX_OPEN_DESCRIPTORS,
    SETUP_SECS,
    Feed,
    Send,
    Slots,
    Transport,
)
from infer_server.protos import inference as pb

_OK = 200
_STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
             413: "RESOURCE_EXHAUSTED", 429: "RESOURCE_EXHAUSTED", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE",
             504: "DEADLINE_EXCEEDED"}


class HttpTransport(Transport):
    max_in_flight = MAX_OPEN_DESCRIPTORS

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._host, self._port = address, host.strip("[]"), int(port)
        self._free: list[HttpClientConnection] = []
        self._all: set[HttpClientConnection] = set()
        self.slots = Slots(MAX_OPEN_DESCRIPTORS)
        self._outside = Slots(1)        # for calls outside the load, which do not wait for its connections

    async def metadata(self, model: str, version: str) -> pb.ModelMetadataResponse:
        return await self._get(_path(model, version), pb.ModelMetadataResponse())

    async def statistics(self, model: str, version: str) -> list[pb.ModelStatistics]:
        return list((await self._get(f"{_path(model, version)}/stats", pb.ModelStatisticsResponse())).model_stats)

    async def prepare(self, model: str, version: str, feeds: Sequence[Feed]) -> Sequence[Send]:
        return [self._sender(self._infer_request(f"{_path(model, version)}/infer", feed)) for feed in feeds]

    async def close(self) -> None:
        for connection in self._all:
            connection.close()

    def _sender(self, request: bytes) -> Send:
        async def send(timeout: float) -> None:
            answer = await self._request(request, timeout, self.slots)
            if answer.status != _OK:
                raise StatusError(_STATUSES.get(answer.status, "INTERNAL"), _error_of(answer))

        return send

    async def _request(self, request: bytes, timeout: float, slots: Slots) -> Answer:
        """Send a request on a free connection. Raises StatusError if there is no answer."""
        connection: HttpClientConnection | None = None
        try:
            async with slots.one(timeout):
                connection = await self._connection()
                return await connection.request(request)
        finally:
            if connection and connection.is_usable:
                self._free.append(connection)
            elif connection:
                connection.close()
                self._all.discard(connection)

    async def _connection(self) -> HttpClientConnection:
        while self._free:
            if (connection := self._free.pop()).is_usable:
                return connection
            self._all.discard(connection)
        connection = await connect(self._host, self._port)
        self._all.add(connection)
        return connection

    async def _get(self, path: str, message: Response) -> Response:
        """Get a path and parse its JSON into the message. Raises ClientError."""
        try:
            answer = await self._request(_head("GET", path, self._address, 0), SETUP_SECS, self._outside)
        except StatusError as error:
            raise error_of(error.status, f"http://{self._address}", f"GET {path}", error.details) from error
        if answer.status != _OK:
            raise error_of(_STATUSES.get(answer.status, "INTERNAL"), f"http://{self._address}", f"GET {path}",
                           _error_of(answer))
        try:
            return json_format.ParseDict(json.loads(answer.body), message, ignore_unknown_fields=True)
        except (ValueError, TypeError, AttributeError, json_format.ParseError) as error:
            raise ResponseError(f"http://{self._address}: GET {path}: the answer is not the protocol's JSON: {error}"
                                ) from error

    def _infer_request(self, path: str, feed: Feed) -> bytes:
        contents = [encode(array) for array in feed.values()]
        header = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [
            {"name": name, "datatype": datatype_of(array), "shape": array.shape,
             "parameters": {"binary_data_size": len(raw)}}
            for (name, array), raw in zip(feed.items(), contents, strict=True)]}).encode()
        body = b"".join((header, *contents))
        return _head("POST", path, self._address, len(body),
                     f"Inference-Header-Content-Length: {len(header)}\r\n") + body


def _head(method: str, path: str, host: str, body_bytes: int, more: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {body_bytes}\r\n{more}\r\n".encode()


def _path(model: str, version: str) -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{version}" if version else "")


def _error_of(answer: Answer) -> str:
    """Return the error message in the answer, or its status."""
    try:
        message = json.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status}"
    return str(message)
