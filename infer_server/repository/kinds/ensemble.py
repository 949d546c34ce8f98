"""Ensembles: models that run through other models.

Tensors pass from step to step as arrays; they are copied once, out of the memory of the engine that made them.
"""
from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from infer_server.batching.request import Request
from infer_server.batching.statistics import BatchExecution, Failure
from infer_server.config.config import from_message
from infer_server.config.pbtxt import nearest
from infer_server.config.signature import Items, Signature
from infer_server.config.steps import Step
from infer_server.errors import ModelConfigError, RepositoryError, ServeError, UnavailableError
from infer_server.repository.folders import Source
from infer_server.repository.kinds.ensemble_run import Run
from infer_server.repository.kinds.local import Find
from infer_server.repository.model import Model
from protos import model_config


class EnsembleModel(Model):
    """Its steps' models are loaded when it is constructed, and found anew for each request."""
    platform = "ensemble"

    def __init__(self, source: Source, find: Find) -> None:
        """Raises RepositoryError: a step's model is not ready, or has no such tensors."""
        message = _complete(source.message, source.name)
        config = from_message(message)
        if not config.inputs or not config.outputs:
            raise ModelConfigError("input and output: an ensemble needs them in its config.pbtxt")
        super().__init__(source.name, source.version, message, config,
                         Signature(config, Items(config.batched, config.batching.max_batch_size)))
        self._find = find
        self._runs: dict[Request, Run] = {}
        self._closed = False
        for number, step in enumerate(config.steps):
            if _check_step(number, step, find).config.decoupled:
                self.config = replace(self.config, decoupled=True)
                self.config_message.model_transaction_policy.decoupled = True

    @property
    def pending(self) -> int:
        return len(self._runs)

    def submit(self, request: Request) -> None:
        if self._closed:
            raise UnavailableError.closed(self.name)
        request.enqueued_ns = time.monotonic_ns()
        absent = {spec.name for spec in self.config.inputs if spec.name not in request.inputs}
        run = self._runs[request] = Run(request, absent, self._find, self._finish)
        run.begin(dict(request.inputs), dict(enumerate(self.config.steps)))

    def cancel(self, request: Request) -> None:
        if run := self._runs.pop(request, None):
            run.cancel()
            self.failed(request, Failure.CANCELED)

    def drain(self) -> None:
        self._closed = True
        while self._runs:               # their steps' models answer on the event loop meanwhile
            time.sleep(0.01)

    def _finish(self, request: Request, result: Any) -> None:
        if self._runs.pop(request, None) is None:
            return
        if request.reply.gone:
            self.failed(request, Failure.CANCELED)
        elif isinstance(result, Exception):
            self.failed(request, Failure.BACKEND)
        else:
            begun_ns, now_ns = request.enqueued_ns, time.monotonic_ns()
            self.statistics.executed(
                BatchExecution(request.items, begun_ns, begun_ns, begun_ns, now_ns, now_ns), [begun_ns])
        request.finish(result)


def _check_step(number: int, step: Step, find: Find) -> Model:
    """The step's model. Raises RepositoryError."""
    try:
        model = find(step.model, step.version)
    except ServeError as error:
        raise RepositoryError(f"ensemble_scheduling: step {number}: {error}") from error
    for kind, given, specs in (("input_map", step.inputs, model.config.inputs),
                               ("output_map", step.outputs, model.config.outputs)):
        known = [spec.name for spec in specs]
        for name in given:
            if name not in known:
                raise ModelConfigError(f"ensemble_scheduling: step {number}: {kind}: model '{step.model}' has no "
                                       f"'{name}', but {', '.join(known)}.{nearest(name, known)}")
    missing = {spec.name for spec in model.config.inputs if not spec.is_optional} - step.inputs.keys()
    if missing:
        raise ModelConfigError(f"ensemble_scheduling: step {number}: input_map: model '{step.model}' needs "
                               f"'{min(missing)}', too")
    return model


def _complete(message: model_config.ModelConfig, name: str) -> model_config.ModelConfig:
    completed = model_config.ModelConfig()
    completed.CopyFrom(message)
    if completed.name not in ("", name):
        raise ModelConfigError(f"name: expected '{name}', the name of its folder, got '{completed.name}'")
    completed.name, completed.platform, completed.backend = name, "ensemble", ""
    completed.max_batch_size = completed.max_batch_size     # 0 is said, too
    if not completed.version_policy.WhichOneof("policy_choice"):
        completed.version_policy.latest.num_versions = 1
    return completed
