"""Ensembles: a request runs through other models, each step as soon as the tensors are there that it reads.

Tensors pass from step to step as arrays; they are copied once, out of the memory of the engine that made them.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.request import Arrays, Request
from infer_server.batching.statistics import BatchExecution, Failure
from infer_server.config.config import from_message
from infer_server.config.pbtxt import nearest
from infer_server.config.signature import Items, Signature
from infer_server.config.steps import Step
from infer_server.errors import ModelConfigError, NotServedError, RepositoryError, ServeError, UnavailableError
from infer_server.repository.folders import Source
from infer_server.repository.local import Find, request_of
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
        self._runs: dict[Request, _Run] = {}
        self._closed = False
        for number, step in enumerate(config.steps):
            _check_step(number, step, find)

    @property
    def pending(self) -> int:
        return len(self._runs)

    def submit(self, request: Request) -> None:
        if self._closed:
            raise UnavailableError(f"model '{self.name}' takes no more requests: it is being unloaded, or the server "
                                   "is stopping")
        request.enqueued_ns = time.monotonic_ns()
        absent = {spec.name for spec in self.config.inputs if spec.name not in request.inputs}
        self._runs[request] = run = _Run(request, absent, self.config.steps, self._find, self._finish)
        run.advance()

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
            self.statistics.executed(BatchExecution(request.items, begun_ns, begun_ns, now_ns, now_ns), [begun_ns])
        request.finish(result)


class _Run:
    """A request on its way through the steps. Belongs to the event loop."""

    def __init__(self, request: Request, absent: set[str], steps: tuple[Step, ...], find: Find,
                 finish: Callable[[Request, Any], None]) -> None:
        self._request, self._absent, self._find, self._finish = request, absent, find, finish
        self._tensors: dict[str, NDArray[Any]] = dict(request.inputs)
        self._waiting = dict(enumerate(steps))          # steps that have not begun
        self._asked: dict[int, tuple[Model, Request]] = {}
        self._ended = False

    def advance(self) -> None:
        """Begins the steps whose inputs are there, but for those that the client left out."""
        for number, step in list(self._waiting.items()):
            if not self._ended and self._tensors.keys() >= set(step.inputs.values()) - self._absent:
                del self._waiting[number]
                self._begin(number, step)

    def cancel(self) -> None:
        self._ended = True
        for model, request in self._asked.values():
            model.cancel(request)
        self._asked.clear()

    def _begin(self, number: int, step: Step) -> None:
        try:
            model = self._find(step.model, step.version)
            if model.config.decoupled:
                raise NotServedError("a decoupled model is no step of an ensemble; call it from a Python model (BLS)")
            inputs = {name: self._tensors[tensor] for name, tensor in step.inputs.items() if tensor in self._tensors}
            request = request_of(
                model, inputs, list(step.outputs), _kept,
                _StepReply(self, number, step), deadline_ns=self._request.deadline_ns,
                timeout_us=self._request.timeout_us, priority=self._request.priority, sequence=self._request.sequence,
                request_id=self._request.id, parameters=self._request.parameters)
            self._asked[number] = (model, request)
            model.submit(request)
        except ServeError as error:
            self.fail(number, step, error)

    def answered(self, number: int, step: Step, outputs: Arrays) -> None:
        del self._asked[number]
        self._tensors.update({tensor: outputs[name] for name, tensor in step.outputs.items()})
        self.advance()
        if not self._waiting and not self._asked and not self._ended:
            self._ended = True
            self._finish(self._request, self._encoded())

    def fail(self, number: int, step: Step, error: Exception) -> None:
        if not self._ended:
            self._asked.pop(number, None)
            self.cancel()
            kind = type(error) if isinstance(error, ServeError) else RepositoryError
            self._finish(self._request, kind(f"step {number} ('{step.model}'): {error}"))

    def _encoded(self) -> Any:
        try:
            return self._request.encode(self._tensors)
        except Exception as error:      # of whatever protocol it came by
            return error

    @property
    def ended(self) -> bool:
        return self._ended


class _StepReply:
    """Takes the response of a step."""

    def __init__(self, run: _Run, number: int, step: Step) -> None:
        self._run, self._number, self._step = run, number, step

    @property
    def gone(self) -> bool:
        return self._run.ended

    def send(self, response: Arrays) -> None:
        self._run.answered(self._number, self._step, response)

    def fail(self, error: Exception) -> None:
        self._run.fail(self._number, self._step, error)


def _kept(computed: Arrays) -> Arrays:
    """The outputs of a step: an engine's are valid only until it executes again."""
    return {name: np.array(array) for name, array in computed.items()}


def _check_step(number: int, step: Step, find: Find) -> None:
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
