"""Synchronous client of an inference server that speaks KServe v2 over gRPC (this one, or Triton).

    with InferenceClient("localhost:8001") as client:
        scores = client.infer("classifier", {"input": images})["logits"]
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from infer_server.clients.calls import METHODS, Response, error_from_status, parse
from infer_server.clients.channels import ChannelOptions, Metadata, StatusError, open_channel
from infer_server.clients.codec import Array, infer_outputs, serialised_request
from infer_server.protos import inference as pb
from infer_server.protos import model_config


class InferenceClient:
    """A channel to a server, or to several that serve the same models; any thread may call it.

    Every call raises a ClientError (clients/errors.py).

    Parameters
    ----------
    url : "HOST:PORT" or "unix:PATH"; for several servers a sequence of "HOST:PORT", one string with commas between, or
        "dns:///NAME:PORT", which stands for all addresses of a name. Nothing is sent until the first call.
    options : the fields of infer_server.clients.channels.ChannelOptions.
    """

    def __init__(self, url: str | Sequence[str], **options: Any) -> None:
        self.url = url if isinstance(url, str) else ",".join(url)
        self._channel = open_channel(self.url, ChannelOptions(**options))

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def is_server_live(self, *, timeout: float | None = None) -> bool:
        return self._call(pb.ServerLiveResponse, pb.ServerLiveRequest(), timeout).live

    def is_server_ready(self, *, timeout: float | None = None) -> bool:
        """Return True if all models are ready; False also while the server drains."""
        return self._call(pb.ServerReadyResponse, pb.ServerReadyRequest(), timeout).ready

    def is_model_ready(self, model: str, version: str = "", *, timeout: float | None = None) -> bool:
        return self._call(pb.ModelReadyResponse, pb.ModelReadyRequest(name=model, version=version), timeout).ready

    def model_metadata(self, model: str, version: str = "", *,
                       timeout: float | None = None) -> pb.ModelMetadataResponse:
        """Return names, datatypes and shapes of inputs and outputs; -1 is a dynamic extent."""
        return self._call(pb.ModelMetadataResponse, pb.ModelMetadataRequest(name=model, version=version), timeout)

    def model_config(self, model: str, version: str = "", *, timeout: float | None = None) -> model_config.ModelConfig:
        """Return the complete configuration, including the fields that the server filled in."""
        return self._call(pb.ModelConfigResponse, pb.ModelConfigRequest(name=model, version=version), timeout).config

    def statistics(self, model: str = "", version: str = "", *,
                   timeout: float | None = None) -> list[pb.ModelStatistics]:
        """Return an entry for each version of one or all models; counts are cumulative, durations in nanoseconds."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return list(self._call(pb.ModelStatisticsResponse, request, timeout).model_stats)

    def infer(self, model: str, inputs: Mapping[str, Array], version: str = "", *, timeout: float | None = None,
              priority: int = 0, request_id: str = "", metadata: Metadata = ()) -> dict[str, Array]:
        """Return {output name: array} for {input name: array}; shapes carry the batch in front.

        Parameters
        ----------
        version : "" is the server's choice.
        timeout : seconds; None waits.
        priority : 1 is the most urgent level; 0 is the model's default.
        metadata : pairs of a name and a value, sent in addition to those of the channel.
        """
        request = serialised_request(model, inputs, version=version, request_id=request_id, priority=priority)
        return infer_outputs(self._call(pb.ModelInferResponse, request, timeout, metadata))

    def _call(self, kind: type[Response], request: Message | tuple[bytes, ...], timeout: float | None,
              metadata: Metadata = ()) -> Response:
        """Make a call and parse its response."""
        message = request if isinstance(request, tuple) else request.SerializeToString()
        try:
            data = self._channel.call(METHODS[kind].path, message, timeout, tuple(metadata))
        except StatusError as error:
            raise error_from_status(error, self.url, kind) from error
        return parse(kind, data, self.url)
