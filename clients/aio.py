"""The asyncio client: the calls of clients.client.InferenceClient, awaited.

    async with AsyncInferenceClient("localhost:8001") as client:
        answers = await asyncio.gather(*(client.infer("classifier", {"input": image}) for image in images))
"""
from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import grpc

from clients.calls import METHODS, NO_LIMIT, bind, channel_options
from clients.codec import Array, infer_outputs, infer_request
from clients.errors import error_from_rpc
from protos import inference as pb
from protos import model_config


class AsyncInferenceClient:
    """One channel to one server, for one event loop. Every call raises a ClientError (clients/errors.py)."""

    def __init__(self, url: str, *, max_message_bytes: int = NO_LIMIT) -> None:
        """`url` is "host:port"; nothing is sent until the first call. To be made inside the loop that uses it."""
        self.url = url
        self._channel = grpc.aio.insecure_channel(url, options=channel_options(max_message_bytes))
        self._calls = {name: bind(self._channel, name) for name in METHODS}

    async def __aenter__(self) -> AsyncInferenceClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def is_server_live(self, *, timeout: float | None = None) -> bool:
        response: pb.ServerLiveResponse = await self._call("ServerLive", pb.ServerLiveRequest(), timeout)
        return response.live

    async def is_server_ready(self, *, timeout: float | None = None) -> bool:
        response: pb.ServerReadyResponse = await self._call("ServerReady", pb.ServerReadyRequest(), timeout)
        return response.ready

    async def is_model_ready(self, model: str, version: str = "", *, timeout: float | None = None) -> bool:
        response: pb.ModelReadyResponse = await self._call(
            "ModelReady", pb.ModelReadyRequest(name=model, version=version), timeout)
        return response.ready

    async def model_metadata(self, model: str, version: str = "", *,
                             timeout: float | None = None) -> pb.ModelMetadataResponse:
        response: pb.ModelMetadataResponse = await self._call(
            "ModelMetadata", pb.ModelMetadataRequest(name=model, version=version), timeout)
        return response

    async def model_config(self, model: str, version: str = "", *,
                           timeout: float | None = None) -> model_config.ModelConfig:
        response: pb.ModelConfigResponse = await self._call(
            "ModelConfig", pb.ModelConfigRequest(name=model, version=version), timeout)
        return response.config

    async def statistics(self, model: str = "", version: str = "", *,
                         timeout: float | None = None) -> list[pb.ModelStatistics]:
        response: pb.ModelStatisticsResponse = await self._call(
            "ModelStatistics", pb.ModelStatisticsRequest(name=model, version=version), timeout)
        return list(response.model_stats)

    async def infer(self, model: str, inputs: Mapping[str, Array], version: str = "", *, timeout: float | None = None,
                    priority: int = 0, request_id: str = "") -> dict[str, Array]:
        request = infer_request(model, inputs, version=version, request_id=request_id, priority=priority)
        return infer_outputs(await self._call("ModelInfer", request, timeout))

    async def _call(self, name: str, request: Any, timeout: float | None) -> Any:
        try:
            return await self._calls[name](request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.url, name) from error
