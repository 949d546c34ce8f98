"""Requests over gRPC: one channel, messages as bytes, responses that nobody parses."""
from __future__ import annotations

from collections.abc import Sequence

from clients.aio import AsyncInferenceClient
from clients.calls import METHODS
from clients.channels import ChannelOptions, open_async_channel
from clients.codec import infer_request
from clients.load.transports.transport import SETUP_SECS, Feed, Send, Transport
from protos import inference as pb

_PATH = METHODS[pb.ModelInferResponse].path


class GrpcTransport(Transport):
    def __init__(self, address: str) -> None:
        self.client = AsyncInferenceClient(address)
        self._channel = open_async_channel(address, ChannelOptions())

    async def metadata(self, model: str, version: str) -> pb.ModelMetadataResponse:
        return await self.client.model_metadata(model, version, timeout=SETUP_SECS)

    async def statistics(self, model: str, version: str) -> list[pb.ModelStatistics]:
        return await self.client.statistics(model, version, timeout=SETUP_SECS)

    async def prepare(self, model: str, version: str, feeds: Sequence[Feed]) -> Sequence[Send]:
        return [self._sender(infer_request(model, feed, version=version).SerializeToString()) for feed in feeds]

    async def close(self) -> None:
        await self._channel.close()
        await self.client.close()

    async def infer(self, request: bytes, timeout: float) -> bytes:
        """Return the serialised response. Raises StatusError."""
        return await self._channel.call(_PATH, request, timeout)

    def _sender(self, request: bytes) -> Send:
        async def send(timeout: float) -> None:
            await self.infer(request, timeout)

        return send
