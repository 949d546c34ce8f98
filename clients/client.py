"""A synchronous client of an inference server that speaks KServe v2 over gRPC (this one, or Triton).

    with InferenceClient("localhost:8001") as client:
        scores = client.infer("classifier", {"input": images})["logits"]
"""
from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf.message import Message

from clients.calls import METHODS, NO_LIMIT, Response, bind, channel_options
from clients.codec import Array, infer_outputs, infer_request
from clients.errors import error_from_rpc
from protos import inference as pb
from protos import model_config


class InferenceClient:
    """One channel to one server; any thread may call it. Every call raises a ClientError (clients/errors.py)."""

    def __init__(self, url: str, *, max_message_bytes: int = NO_LIMIT) -> None:
        """`url` is "host:port"; nothing is sent until the first call."""
        self.url = url
        self._channel = grpc.insecure_channel(url, options=channel_options(max_message_bytes))
        self._calls = {response: bind(self._channel, response) for response in METHODS}

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def is_server_live(self, *, timeout: float | None = None) -> bool:
        return self._call(pb.ServerLiveResponse, pb.ServerLiveRequest(), timeout).live

    def is_server_ready(self, *, timeout: float | None = None) -> bool:
        """Whether all models are ready; False too while the server drains."""
        return self._call(pb.ServerReadyResponse, pb.ServerReadyRequest(), timeout).ready

    def is_model_ready(self, model: str, version: str = "", *, timeout: float | None = None) -> bool:
        return self._call(pb.ModelReadyResponse, pb.ModelReadyRequest(name=model, version=version), timeout).ready

    def model_metadata(self, model: str, version: str = "", *,
                       timeout: float | None = None) -> pb.ModelMetadataResponse:
        """Names, datatypes and shapes of inputs and outputs; an extent of -1 varies."""
        return self._call(pb.ModelMetadataResponse, pb.ModelMetadataRequest(name=model, version=version), timeout)

    def model_config(self, model: str, version: str = "", *, timeout: float | None = None) -> model_config.ModelConfig:
        """The complete configuration, what the server filled in included."""
        return self._call(pb.ModelConfigResponse, pb.ModelConfigRequest(name=model, version=version), timeout).config

    def statistics(self, model: str = "", version: str = "", *,
                   timeout: float | None = None) -> list[pb.ModelStatistics]:
        """An entry for each version of the model, or of all models; counts are cumulative, durations nanoseconds."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return list(self._call(pb.ModelStatisticsResponse, request, timeout).model_stats)

    def infer(self, model: str, inputs: Mapping[str, Array], version: str = "", *, timeout: float | None = None,
              priority: int = 0, request_id: str = "") -> dict[str, Array]:
        """{output name: array} for {input name: array}; shapes carry the batch in front.

        version "" is the server's choice; `timeout` is in seconds, None waits; `priority` 1 is the most urgent level.
        """
        request = infer_request(model, inputs, version=version, request_id=request_id, priority=priority)
        return infer_outputs(self._call(pb.ModelInferResponse, request, timeout))

    def _call(self, kind: type[Response], request: Message, timeout: float | None) -> Response:
        """The call whose response is of this kind."""
        try:
            response: Response = self._calls[kind](request, timeout=timeout)
            return response
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.url, METHODS[kind].name) from error
