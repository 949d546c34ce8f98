"""Asyncio client: the calls of infer_server.clients.client.InferenceClient as coroutines.

    async with AsyncInferenceClient("localhost:8001") as client:
        answers = await asyncio.gather(*(client.infer("classifier", {"input": image}) for image in images))
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from infer_server.clients.calls import METHODS, Response, error_from_status, parse
from infer_server.clients.channels import ChannelOptions, Metadata, StatusError, open_async_channel
from infer_server.clients.codec import Array, infer_outputs, serialised_request
from infer_server.protos import inference as pb
from infer_server.protos import model_config


class AsyncInferenceClient:
    """Client of one server, or of several with the same models, on the event loop in which it is created.

    Every call raises a ClientError (clients/errors.py). Parameters are those of
    infer_server.clients.client.InferenceClient.
    """

    def __init__(self, url: str | Sequence[str], **options: Any) -> None:
        self.url = url if isinstance(url, str) else ",".join(url)
        self._channel = open_async_channel(self.url, ChannelOptions(**options))

    async def __aenter__(self) -> AsyncInferenceClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def is_server_live(self, *, timeout: float | None = None) -> bool:
        return (await self._call(pb.ServerLiveResponse, pb.ServerLiveRequest(), timeout)).live

    async def is_server_ready(self, *, timeout: float | None = None) -> bool:
        return (await self._call(pb.ServerReadyResponse, pb.ServerReadyRequest(), timeout)).ready

    async def is_model_ready(self, model: str, version: str = "", *, timeout: float | None = None) -> bool:
        response = await self._call(pb.ModelReadyResponse, pb.ModelReadyRequest(name=model, version=version), timeout)
        return response.ready

    async def model_metadata(self, model: str, version: str = "", *,
                             timeout: float | None = None) -> pb.ModelMetadataResponse:
        return await self._call(pb.ModelMetadataResponse, pb.ModelMetadataRequest(name=model, version=version), timeout)

    async def model_config(self, model: str, version: str = "", *,
                           timeout: float | None = None) -> model_config.ModelConfig:
        response = await self._call(pb.ModelConfigResponse, pb.ModelConfigRequest(name=model, version=version), timeout)
        return response.config

    async def statistics(self, model: str = "", version: str = "", *,
                         timeout: float | None = None) -> list[pb.ModelStatistics]:
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return list((await self._call(pb.ModelStatisticsResponse, request, timeout)).model_stats)

    async def infer(self, model: str, inputs: Mapping[str, Array], version: str = "", *, timeout: float | None = None,
                    priority: int = 0, request_id: str = "", metadata: Metadata = ()) -> dict[str, Array]:
        request = serialised_request(model, inputs, version=version, request_id=request_id, priority=priority)
        return infer_outputs(await self._call(pb.ModelInferResponse, request, timeout, metadata))

    async def _call(self, kind: type[Response], request: Message | tuple[bytes, ...], timeout: float | None,
                    metadata: Metadata = ()) -> Response:
        """Make a call and parse its response."""
        message = request if isinstance(request, tuple) else request.SerializeToString()
        try:
            data = await self._channel.call(METHODS[kind].path, message, timeout, tuple(metadata))
        except StatusError as error:
            raise error_from_status(error, self.url, kind) from error
        return parse(kind, data, self.url)
