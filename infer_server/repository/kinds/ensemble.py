"""Ensembles: models that run through other models.

Tensors pass from step to step as arrays; they are copied once, out of the memory of the engine that made them.
"""
from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from infer_server.batching.cache import CachedResponses
from infer_server.batching.request import Request
from infer_server.batching.statistics import BatchExecution, Failure
from infer_server.config.config import complete_policy, from_message
from infer_server.config.paths import check_name
from infer_server.config.signature import Items, ModelSignature
from infer_server.config.steps import EnsembleStep
from infer_server.errors import ModelConfigError, RepositoryError, ServeError, UnavailableError
from infer_server.protos import model_config
from infer_server.repository.folders import Source
from infer_server.repository.kinds.ensemble_check import check_ensemble
from infer_server.repository.kinds.ensemble_run import EnsembleRun
from infer_server.repository.kinds.local import UNCOUNTED, Find, TensorMemory
from infer_server.repository.model import Model


class EnsembleModel(Model):
    """Ensemble whose composing models are loaded when it is constructed and looked up again for each request."""

    def __init__(self, source: Source, find: Find, memory: TensorMemory = UNCOUNTED) -> None:
        """Create an ensemble. Raises RepositoryError if a step's model is not ready or lacks a tensor."""
        message = _complete(source.message, source.name)
        config = from_message(message)
        if not config.inputs or not config.outputs:
            raise ModelConfigError("input and output: an ensemble needs them in its config.pbtxt")
        super().__init__(source.name, source.version, message, config,
                         ModelSignature(config, Items(config.batched, config.batching.max_batch_size)))
        self._find, self._memory = find, memory
        self._runs: dict[Request, EnsembleRun] = {}
        self._closed = False
        models = [_model_of(number, step, find) for number, step in enumerate(config.steps)]
        check_ensemble(config, [model.config for model in models])
        outputs = {spec.name for spec in config.outputs}
        labels: dict[str, Sequence[str]] = {}
        for step, model in zip(config.steps, models, strict=True):
            labels |= {tensor: model.labels[name] for name, tensor in step.outputs.items()
                       if tensor in outputs and name in model.labels}
            if model.config.decoupled:
                self.config = replace(self.config, decoupled=True)
                self.config_message.model_transaction_policy.decoupled = True
        if config.cached and not all(model.is_repeatable for model in models):
            kind = "a decoupled model" if self.config.decoupled else "a sequence"
            raise ModelConfigError(f"response_cache: {kind}'s responses are not cached, and a step has such; remove it")
        self._loaded_with = b"".join(model.revision for model in models)
        self.labels = labels                # used if the ensemble has no label files, as in Triton

    async def is_ready(self) -> bool:
        try:
            models = self._models()
        except ServeError:
            return False
        return all(await asyncio.gather(*(model.is_ready() for model in models)))

    @property
    def pending(self) -> int:
        return 0                        # requests wait in the queues of the composing models

    @property
    def is_busy(self) -> bool:
        return bool(self._runs)

    @property
    def revision(self) -> bytes:
        """Bytes that change when the ensemble or a model it calls is loaded again. Raises ServeError."""
        return self._key + self._called

    @property
    def _called(self) -> bytes:
        """Revisions of the composing models. Raises ServeError if one is not ready."""
        return b"".join(model.revision for model in self._models())

    @property
    def is_current(self) -> bool:
        try:
            return self._called == self._loaded_with
        except ServeError:
            return False

    @property
    def is_decoupled(self) -> bool:
        """True if a composing model is decoupled now."""
        try:
            return any(model.is_decoupled for model in self._models())
        except ServeError:
            return self.config.decoupled

    @property
    def is_repeatable(self) -> bool:
        """True if all composing models are repeatable now. Raises ServeError if one is not ready."""
        return all(model.is_repeatable for model in self._models())

    def _models(self) -> list[Model]:
        return [self._find(step.model, step.version) for step in self.config.steps]

    def submit(self, request: Request) -> None:
        if self._closed:
            raise UnavailableError.closed(self.name)
        if self._cached and self._answer_from_cache(request, self._cached):
            return
        request.enqueued_ns = time.monotonic_ns()
        run = self._runs[request] = EnsembleRun(request, self.config, self._find, self._finish, self._memory)
        run.begin()

    def _answer_from_cache(self, request: Request, cached: CachedResponses) -> bool:
        try:
            return self.is_repeatable and cached.answers(request, self.revision)
        except ServeError:                  # raised again if the request reaches that step
            return False

    def cancel(self, request: Request) -> None:
        if run := self._runs.pop(request, None):
            run.cancel()
            self.failed(request, Failure.CANCELED)

    def drain(self) -> None:
        self._closed = True
        while self._runs:               # the steps of runs complete on the event loop
            time.sleep(0.01)
        if self._cached:
            self._cached.drop()

    def _finish(self, request: Request, result: Any) -> None:
        if self._runs.pop(request, None) is None:
            return
        if request.reply.gone:
            self.failed(request, Failure.CANCELED)
        elif isinstance(result, Exception):
            self.failed(request, Failure.OTHER)         # as in Triton; the composing model counts the actual reason
        else:
            begun_ns, now_ns = request.enqueued_ns, time.monotonic_ns()
            self.statistics.executed(
                BatchExecution(request.items, begun_ns, begun_ns, begun_ns, now_ns, now_ns), [begun_ns],
                responding_ns=[request.responding_ns(now_ns)])
        request.finish(result)


def _model_of(number: int, step: EnsembleStep, find: Find) -> Model:
    """Look up a step's model. Raises RepositoryError if it is not ready."""
    try:
        return find(step.model, step.version)
    except ServeError as error:
        raise RepositoryError(f"ensemble_scheduling: step {number}: {error}") from error


def _complete(message: model_config.ModelConfig, name: str) -> model_config.ModelConfig:
    completed = model_config.ModelConfig()
    completed.CopyFrom(message)
    check_name(completed.name, name)
    completed.name, completed.platform, completed.backend = name, "ensemble", ""
    completed.max_batch_size = completed.max_batch_size     # makes the field present even if it is 0
    complete_policy(completed)
    return completed
