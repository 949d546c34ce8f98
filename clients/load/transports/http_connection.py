"""HTTP/1.1 client connection: one request at a time, as bytes; httptools parses the response."""
from __future__ import annotations

import asyncio
from typing import NamedTuple, cast

import httptools


class Answer(NamedTuple):
    status: int
    body: bytes


class HttpClientConnection(asyncio.Protocol):
    """Connection, from connect(); can be reused while `is_usable`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._awaited: asyncio.Future[Answer] | None = None
        self._body: list[bytes] = []

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._awaited is None

    async def request(self, request: bytes) -> Answer:
        """Send a request and return its answer. Raises OSError if the connection ends or the answer is not HTTP."""
        assert self._transport is not None, "it is usable"
        self._awaited = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._awaited

    def close(self) -> None:
        if self._transport:
            self._transport.abort()

    # ---- the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)       # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"what comes back is not HTTP: {error}"))
            self.close()

    def connection_lost(self, reason: Exception | None) -> None:
        self._transport = None
        self._fail(ConnectionError("the server closed the connection" if reason is None else str(reason)))

    # ---- httptools' callbacks
    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        awaited, self._awaited = self._awaited, None
        if awaited and not awaited.done():
            awaited.set_result(Answer(self._parser.get_status_code(), b"".join(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._awaited and not self._awaited.done():
            self._awaited.set_exception(error)


async def connect(host: str, port: int) -> HttpClientConnection:
    """Open a connection. Raises OSError."""
    _, connection = await asyncio.get_running_loop().create_connection(HttpClientConnection, host, port)
    return connection
