"""Calls of the protocol except inference, on protobuf messages, for both gRPC and HTTP."""
from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from infer_server.batching.statistics import BatchStatistics, Duration
from infer_server.endpoints.memory_service import MemoryService
from infer_server.endpoints.settings import SettingsService
from infer_server.errors import InvalidRequestError, NotServedError, ServeError, UnavailableError
from infer_server.lifecycle import Lifecycle
from infer_server.protocol.parameters import Parameters, from_messages, typed
from infer_server.protocol.redaction import redacted
from infer_server.protos import inference, model_config
from infer_server.protos.version import NAME, VERSION
from infer_server.repository.model import Model
from infer_server.repository.on_demand import OnDemand
from infer_server.repository.overrides import PREFIX
from infer_server.repository.repository import LOAD_FAILED, Repository

EXTENSIONS = ("classification", "sequence", "model_repository", "model_repository(unload_dependents)",
              "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
              "binary_tensor_data", "parameters", "statistics", "trace", "logging")

_DEPENDENTS = "unload_dependents"


class ModelService:
    """Calls about the server, models and the repository: one coroutine for each, of its name. Raise ServeErrors."""

    def __init__(self, repository: Repository, lifecycle: Lifecycle, explicit_control: bool,
                 on_demand: OnDemand | None = None, server_name: str = NAME) -> None:
        self._repository = repository
        self._lifecycle = lifecycle
        self._explicit_control = explicit_control       # clients may load and unload models
        self._on_demand = on_demand                     # None: models are loaded before requests arrive
        self._server_name = server_name
        self._changes = set[asyncio.Task[None]]()       # loads and unloads; the loop keeps only weak references
        self.waiting = repository.waiting

    async def ServerLive(self, _: inference.ServerLiveRequest) -> inference.ServerLiveResponse:
        return inference.ServerLiveResponse(live=self._lifecycle.live)

    async def ServerReady(self, _: inference.ServerReadyRequest) -> inference.ServerReadyResponse:
        return inference.ServerReadyResponse(ready=self._lifecycle.ready)

    async def ModelReady(self, request: inference.ModelReadyRequest) -> inference.ModelReadyResponse:
        try:
            await self.check_ready(request.name, request.version)
        except InvalidRequestError:
            raise
        except ServeError:
            return inference.ModelReadyResponse(ready=False)
        return inference.ModelReadyResponse(ready=True)

    async def check_ready(self, name: str, version: str) -> None:
        """Raise a ServeError with the reason if a model is not ready."""
        if not await self._repository.find(name, version).is_ready():
            raise UnavailableError(f"Model '{name}' is not ready (user-defined check failed): its is_ready() says so, "
                                   "failed or took too long, or that of one of its steps did")

    async def ServerMetadata(self, _: inference.ServerMetadataRequest) -> inference.ServerMetadataResponse:
        return inference.ServerMetadataResponse(name=self._server_name, version=VERSION, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: inference.ModelMetadataRequest) -> inference.ModelMetadataResponse:
        model = await self._loaded(request.name, request.version)
        versions = [model.version] if request.version else self._repository.versions(request.name)
        response = inference.ModelMetadataResponse(
            name=model.name, versions=map(str, versions), platform=model.platform)
        for tensors, specs in ((response.inputs, model.config.inputs), (response.outputs, model.config.outputs)):
            for spec in specs:
                tensors.add(name=spec.name, datatype=spec.datatype.name, shape=spec.full_shape(model.config.batched))
        return response

    async def ModelConfig(self, request: inference.ModelConfigRequest) -> inference.ModelConfigResponse:
        model = await self._loaded(request.name, request.version)
        return inference.ModelConfigResponse(config=model.config_message)

    async def ModelStatistics(self, request: inference.ModelStatisticsRequest) -> inference.ModelStatisticsResponse:
        if request.version:
            models = [self._version(request.name, request.version)]
        elif request.name:
            self._repository.find(request.name)
            models = [model for model in self._repository.models() if model.name == request.name]
        else:
            models = self._repository.models()
        return inference.ModelStatisticsResponse(model_stats=map(_statistics, models))

    async def RepositoryIndex(self, request: inference.RepositoryIndexRequest) -> inference.RepositoryIndexResponse:
        _check_repository(request.repository_name)
        return inference.RepositoryIndexResponse(models=[
            inference.RepositoryIndexResponse.ModelIndex(
                name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
            for entry in await self._repository.index() if entry.state == "READY" or not request.ready])

    async def RepositoryModelLoad(
            self, request: inference.RepositoryModelLoadRequest) -> inference.RepositoryModelLoadResponse:
        _check_repository(request.repository_name)
        await self._shielded(self.load(request.model_name, from_messages(request.parameters)))
        return inference.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
            self, request: inference.RepositoryModelUnloadRequest) -> inference.RepositoryModelUnloadResponse:
        _check_repository(request.repository_name)
        await self._shielded(self.unload(request.model_name, from_messages(request.parameters)))
        return inference.RepositoryModelUnloadResponse()

    async def _shielded(self, change: Coroutine[Any, Any, None]) -> None:
        """Run a load or unload to its end even if the client cancels the call, as Triton does.

        A cancelled change would leave the model loading or unloading forever.
        """
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def load(self, name: str, parameters: Parameters, at_once: bool = False) -> None:
        """Load a model for a client or a Python model (see kinds.local.Control). Raises ServeErrors."""
        self._check_control()
        if not name.strip():
            raise InvalidRequestError("Model name cannot be empty. Please enter a valid name to deploy.")
        if name.strip() == ".." or "/" in name:
            raise InvalidRequestError(f"invalid model name '{name}', model name must not contain path traversal "
                                      "characters")
        try:
            await self._repository.load(name, _config_override(parameters), _files(parameters), at_once)
        except ServeError as error:
            if str(error).startswith(LOAD_FAILED):
                raise
            raise type(error)(f"failed to load '{name}', failed to poll from model repository: "
                              f"{redacted(str(error))}") from error

    async def unload(self, name: str, parameters: Parameters) -> None:
        """Unload a model for a client or a Python model. Raises ServeErrors."""
        self._check_control()
        if unknown := sorted(parameters.keys() - {_DEPENDENTS}):
            raise InvalidRequestError(f"parameter '{unknown[0]}' of a model unload is not served; only "
                                      f"'{_DEPENDENTS}' is")
        with_steps = typed(parameters, _DEPENDENTS, bool, False)
        steps = self._steps_of(name) if with_steps else set()
        await self._repository.unload(name)
        for step in sorted(steps):
            await self._repository.unload(step)

    def _version(self, name: str, version: str) -> Model:
        """Return a model for statistics. Raises ServeErrors with Triton's message."""
        try:
            return self._repository.find(name, version)
        except ServeError as error:
            raise type(error)(f"requested model version is not available for model '{name}': {error}") from error

    async def _loaded(self, name: str, version: str) -> Model:
        if self._on_demand:
            await self._on_demand.load(name)
        return self._repository.find(name, version)

    def _steps_of(self, name: str) -> set[str]:
        """Return the names of the loaded models that an ensemble calls."""
        loaded = {model.name: model for model in self._repository.models()}
        steps = loaded[name].config_message.ensemble_scheduling.step if name in loaded else ()
        return {step.model_name for step in steps} & loaded.keys()

    def _check_control(self) -> None:
        if not self._explicit_control:
            raise UnavailableError("explicit model load / unload is not allowed if polling is enabled, or if models "
                                   "stay as they were at the start: start the server with --model-control-mode explicit"
                                   )


@dataclass(frozen=True)
class Service:
    """Services of all calls except inference."""
    models: ModelService
    memory: MemoryService
    settings: SettingsService

    def call(self, name: str) -> Callable[[Any], Awaitable[Message]]:
        """Return the coroutine of a call by its name."""
        coroutine: Callable[[Any], Awaitable[Message]] = next(
            getattr(part, name) for part in (self.models, self.memory, self.settings) if hasattr(part, name))
        return coroutine


def _check_repository(name: str) -> None:
    if name:
        raise NotServedError("'repository_name' specification is not supported")


def _config_override(parameters: Parameters) -> model_config.ModelConfig | None:
    """Return the ModelConfig in the parameter "config" of a load (JSON), which replaces config.pbtxt."""
    text: str | None = typed(parameters, "config", str, None)
    if text is None:
        return None
    try:
        return json_format.Parse(text, model_config.ModelConfig())
    except json_format.ParseError as error:
        raise InvalidRequestError(f"parameter 'config': {error}") from error


def _files(parameters: Parameters) -> dict[str, bytes]:
    """Return the parameters "file:<path>" of a load by path; they replace the model's folder."""
    files = {name.removeprefix(PREFIX): typed(parameters, name, bytes, b"")
             for name in parameters if name.startswith(PREFIX)}
    if files and "config" not in parameters:
        raise InvalidRequestError(f"files of a model come with its configuration: give the parameter 'config' beside "
                                  f"'{PREFIX}{min(files)}'")
    if unknown := sorted(name for name in parameters if name != "config" and not name.startswith(PREFIX)):
        raise InvalidRequestError(f"unrecognized load parameter '{unknown[0]}'. Only 'config' and "
                                  f"'{PREFIX}<version>/<file>' are served")
    return files


def _statistics(model: Model) -> inference.ModelStatistics:
    counters = model.statistics.snapshot()
    return inference.ModelStatistics(
        name=model.name, version=str(model.version), last_inference=counters.last_inference_ms,
        inference_count=counters.inference_count, execution_count=counters.execution_count,
        inference_stats=inference.InferStatistics(**_durations(counters)),
        batch_stats=[inference.InferBatchStatistics(batch_size=size, **_durations(batch))
                     for size, batch in sorted(counters.batches.items())],
        memory_usage=[inference.MemoryUsage(type="CPU" if gpu is None else "GPU", id=gpu or 0, byte_size=size)
                      for gpu, size in model.device_bytes.items()])


def _durations(counters: BatchStatistics) -> dict[str, Any]:
    """Return the durations among the counters by name; the protocol uses the same names."""
    return {name: inference.StatisticDuration(count=value.count, ns=value.ns)
            for name, value in vars(counters).items() if isinstance(value, Duration)}
