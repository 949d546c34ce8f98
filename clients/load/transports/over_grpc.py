"""Requests over gRPC: one channel, serialised messages, unparsed responses."""
from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from infer_server.clients.aio import AsyncInferenceClient
from infer_server.clients.calls import METHODS
from infer_server.clients.channels import ChannelOptions, StatusError, open_async_channel
from infer_server.clients.channels.aio import AioChannel
from infer_server.clients.codec import infer_request
from infer_server.clients.load.transports.transport import SETUP_SECS, Feed, Send, StartedSend, Transport
from infer_server.protos import inference as pb

_PATH = METHODS[pb.ModelInferResponse].path


class GrpcTransport(Transport):
    def __init__(self, address: str) -> None:
        self.client = AsyncInferenceClient(address)
        # Without retries, also to several servers: failures are counted.
        self._channel = open_async_channel(address, ChannelOptions(service_config={}))

    async def metadata(self, model: str, version: str) -> pb.ModelMetadataResponse:
        return await self.client.model_metadata(model, version, timeout=SETUP_SECS)

    async def statistics(self, model: str, version: str) -> list[pb.ModelStatistics]:
        return await self.client.statistics(model, version, timeout=SETUP_SECS)

    async def prepare(self, model: str, version: str, feeds: Sequence[Feed]) -> Sequence[Send]:
        requests = (infer_request(model, feed, version=version).SerializeToString() for feed in feeds)
        if isinstance(self._channel, AioChannel):
            return [_PreparedRequest(self._channel, request) for request in requests]
        return [partial(self.infer, request) for request in requests]

    async def close(self) -> None:
        await self._channel.close()
        await self.client.close()

    def infer(self, request: bytes, timeout: float) -> Awaitable[bytes]:
        """Return the serialised response. Raises StatusError."""
        return self._channel.call(_PATH, request, timeout)


class _PreparedRequest(StartedSend):
    """Request that is serialised once."""

    def __init__(self, channel: AioChannel, request: bytes) -> None:
        self._channel, self._request, self._start = channel, request, channel.prepare(_PATH, request)

    def __call__(self, timeout: float) -> Awaitable[bytes]:
        return self._channel.call(_PATH, self._request, timeout)

    def start(self, timeout: float, done: Callable[[StatusError | None], None]) -> bool:
        return self._start(timeout, lambda call: done(call.failure()))
