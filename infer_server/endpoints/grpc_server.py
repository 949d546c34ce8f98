"""The service inference.GRPCInferenceService on grpc.aio."""
from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

import protos
from infer_server.batching.statistics import BatchStatistics, Duration
from infer_server.endpoints.grpc_errors import answering, parsed
from infer_server.endpoints.grpc_infer import infer
from infer_server.endpoints.health import health_handlers
from infer_server.endpoints.inflight import Inflight
from infer_server.errors import InvalidRequestError, NotServedError, ServeError, UnavailableError
from infer_server.lifecycle import Lifecycle
from infer_server.repository.model import Model
from infer_server.repository.repository import Repository
from infer_server.serving import Inferences
from infer_server.version import NAME, VERSION
from protos import inference, model_config

EXTENSIONS = ("model_configuration", "model_repository", "statistics")


class InferenceService:
    """One coroutine for each call that is served, named as the call."""

    def __init__(self, repository: Repository, lifecycle: Lifecycle, inflight: Inflight, explicit_control: bool,
                 disconnect: Callable[[str], None]) -> None:
        """disconnect: ends the connection of a peer as gRPC names it."""
        self._repository = repository
        self._inferences = Inferences(repository)
        self._inflight, self._disconnect = inflight, disconnect
        self._lifecycle = lifecycle
        self._explicit_control = explicit_control       # clients may load and unload models

    async def ServerLive(self, _: inference.ServerLiveRequest) -> inference.ServerLiveResponse:
        return inference.ServerLiveResponse(live=True)

    async def ServerReady(self, _: inference.ServerReadyRequest) -> inference.ServerReadyResponse:
        return inference.ServerReadyResponse(ready=self._lifecycle.ready)

    async def ModelReady(self, request: inference.ModelReadyRequest) -> inference.ModelReadyResponse:
        try:
            self._repository.find(request.name, request.version)
        except InvalidRequestError:
            raise
        except ServeError:
            return inference.ModelReadyResponse(ready=False)
        return inference.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, _: inference.ServerMetadataRequest) -> inference.ServerMetadataResponse:
        return inference.ServerMetadataResponse(name=NAME, version=VERSION, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: inference.ModelMetadataRequest) -> inference.ModelMetadataResponse:
        model = self._repository.find(request.name, request.version)
        versions = [model.version] if request.version else self._repository.versions(request.name)
        response = inference.ModelMetadataResponse(
            name=model.name, versions=map(str, versions), platform=model.config_message.platform)
        for tensors, specs in ((response.inputs, model.config.inputs), (response.outputs, model.config.outputs)):
            for spec in specs:
                tensors.add(name=spec.name, datatype=spec.datatype.name, shape=spec.full_shape(model.config.batched))
        return response

    async def infer(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """ModelInfer takes and returns bytes: infer_server/protocol/wire.py."""
        return await infer(data, context, self._inferences, self._inflight, self._disconnect)

    async def ModelConfig(self, request: inference.ModelConfigRequest) -> inference.ModelConfigResponse:
        model = self._repository.find(request.name, request.version)
        return inference.ModelConfigResponse(config=model.config_message)

    async def ModelStatistics(self, request: inference.ModelStatisticsRequest) -> inference.ModelStatisticsResponse:
        if request.version:
            models = [self._repository.find(request.name, request.version)]
        elif request.name:
            self._repository.find(request.name)
            models = [model for model in self._repository.models() if model.name == request.name]
        else:
            models = self._repository.models()
        return inference.ModelStatisticsResponse(model_stats=map(_statistics, models))

    async def RepositoryIndex(self, request: inference.RepositoryIndexRequest) -> inference.RepositoryIndexResponse:
        return inference.RepositoryIndexResponse(models=[
            inference.RepositoryIndexResponse.ModelIndex(
                name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
            for entry in await self._repository.index() if entry.state == "READY" or not request.ready])

    async def RepositoryModelLoad(
            self, request: inference.RepositoryModelLoadRequest) -> inference.RepositoryModelLoadResponse:
        self._check_control()
        await self._repository.load(request.model_name, _config_override(request))
        return inference.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
            self, request: inference.RepositoryModelUnloadRequest) -> inference.RepositoryModelUnloadResponse:
        self._check_control()
        await self._repository.unload(request.model_name)
        return inference.RepositoryModelUnloadResponse()

    def _check_control(self) -> None:
        if not self._explicit_control:
            raise UnavailableError("explicit model load / unload is not allowed: start the server with "
                                   "--model-control-mode explicit")


def inference_handlers(service: InferenceService) -> grpc.GenericRpcHandler:
    """The handlers of every call of the service; those without a coroutine say that they are not served."""
    handlers = {}
    for method in protos.methods(protos.INFERENCE_SERVICE):
        call: Callable[[Any], Awaitable[Message]] | None = getattr(service, method.name, None)
        if method.name == "ModelInfer":
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(answering(service.infer))
        elif call is None:
            handlers[method.name] = _not_served(method)
        else:
            handlers[method.name] = _served(method, call)
    return grpc.method_handlers_generic_handler(protos.INFERENCE_SERVICE, handlers)


def _concerns_us(record: logging.LogRecord) -> bool:
    """Whether gRPC complains of something else than a client that went away while its answer was being sent."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


logging.getLogger("grpc._cython.cygrpc").addFilter(_concerns_us)


def create_server(service: InferenceService, lifecycle: Lifecycle, max_message_bytes: int) -> grpc.aio.Server:
    """A gRPC server, not started, without ports. Larger messages than `max_message_bytes` get RESOURCE_EXHAUSTED."""
    server = grpc.aio.server(options=[
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),               # a second server on the same port is a mistake, not a share of the load
    ])
    server.add_generic_rpc_handlers((inference_handlers(service), health_handlers(lifecycle)))
    return server


def _served(method: protos.Method, call: Callable[[Any], Awaitable[Message]]) -> grpc.RpcMethodHandler:
    async def serve(data: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return (await call(parsed(method.request, data))).SerializeToString()

    return grpc.unary_unary_rpc_method_handler(answering(serve))


def _not_served(method: protos.Method) -> grpc.RpcMethodHandler:
    async def refuse(*_: Any) -> Any:
        raise NotServedError(f"{method.name} is not served by this server")

    # Every combination of streaming takes a coroutine: it aborts before it reads or writes a message.
    handler = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    return handler(answering(refuse))


def _config_override(request: inference.RepositoryModelLoadRequest) -> model_config.ModelConfig | None:
    """The parameter "config" of a load: a ModelConfig as JSON, instead of config.pbtxt."""
    unknown = sorted(request.parameters.keys() - {"config"})
    if unknown:
        raise InvalidRequestError(f"parameter '{unknown[0]}' of a model load is not served; only 'config' is")
    if "config" not in request.parameters:
        return None
    try:
        return json_format.Parse(request.parameters["config"].string_param, model_config.ModelConfig())
    except json_format.ParseError as error:
        raise InvalidRequestError(f"parameter 'config': {error}") from error


def _statistics(model: Model) -> inference.ModelStatistics:
    counters = model.statistics.snapshot()
    return inference.ModelStatistics(
        name=model.name, version=str(model.version), last_inference=counters.last_inference_ms,
        inference_count=counters.inference_count, execution_count=counters.execution_count,
        inference_stats=inference.InferStatistics(**_durations(counters)),
        batch_stats=[inference.InferBatchStatistics(batch_size=size, **_durations(batch))
                     for size, batch in sorted(counters.batches.items())])


def _durations(counters: BatchStatistics) -> dict[str, Any]:
    """The durations among the counters, under their names, which are those of the protocol too."""
    return {name: inference.StatisticDuration(count=value.count, ns=value.ns)
            for name, value in vars(counters).items() if isinstance(value, Duration)}
