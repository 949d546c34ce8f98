"""A request's way through the steps of an ensemble: each begins as soon as the tensors are there that it reads.

A decoupled step has any number of responses. For each of them a flow of its own goes through the steps behind it, and
ends in a response of the ensemble; those are sent in the order of the step's.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.request import NO_MORE, Arrays, Request, StreamReply
from infer_server.config.steps import Step
from infer_server.errors import ExecutionError, NotServedError, ServeError
from infer_server.repository.kinds.local import Find, request_of
from infer_server.repository.model import Model


class Run:
    """Belongs to the event loop."""

    def __init__(self, request: Request, absent: set[str], find: Find,
                 finish: Callable[[Request, Any], None]) -> None:
        """absent: the inputs that the client left out. finish: takes the response, an error, or NO_MORE."""
        self.request, self.absent, self.find = request, absent, find
        self.ended = False
        self._finish = finish
        self._flows: dict[_Flow, None] = {}             # in the order of their responses
        self._split: set[_Flow] = set()                 # those whose last step is decoupled, and has not ended
        self._streams = False                           # there was one

    def begin(self, tensors: dict[str, NDArray[Any]], waiting: dict[int, Step]) -> None:
        """Begins a flow: of the inputs through all steps; or of a decoupled step's response through those behind it."""
        if not self.ended:
            flow = _Flow(self, tensors, waiting)
            self._flows[flow] = None
            flow.advance()

    def cancel(self) -> None:
        self.ended = True
        for flow in (*self._flows, *self._split):
            flow.cancel()

    def split(self, flow: _Flow) -> None:
        """The flow's last step is decoupled: flows for its responses take its place. Raises NotServedError."""
        if not isinstance(self.request.reply, StreamReply):
            raise NotServedError("the step is decoupled: ask for the ensemble in a stream (ModelStreamInfer)")
        self._streams = True
        del self._flows[flow]
        self._split.add(flow)

    def ended_split(self, flow: _Flow) -> None:
        self._split.discard(flow)
        self.advance()

    def advance(self) -> None:
        """Sends what is complete."""
        while not self.ended and self._flows and (first := next(iter(self._flows))).is_complete:
            del self._flows[first]
            try:
                result = self.request.encode(first.tensors)
            except Exception as error:          # of whatever protocol it came by
                self._end(error)
                return
            if not self._streams:
                self._end(result)
                return
            self.request.part(result)
        if not self.ended and not self._flows and not self._split:
            self._end(NO_MORE)

    def fail(self, number: int, step: Step, error: Exception) -> None:
        kind = type(error) if isinstance(error, ServeError) else ExecutionError
        self._end(kind(f"step {number} ('{step.model}'): {error}"))

    def _end(self, result: Any) -> None:
        if not self.ended:
            self.cancel()
            self._finish(self.request, result)


class _Flow:
    """Tensors by name, and the steps that wait for them."""

    def __init__(self, run: Run, tensors: dict[str, NDArray[Any]], waiting: dict[int, Step]) -> None:
        self.tensors = tensors
        self.is_complete = False
        self._run, self._waiting = run, waiting
        self._asked: dict[int, tuple[Model, Request]] = {}

    def advance(self) -> None:
        """Begins the steps whose inputs are there; a decoupled one when nothing else is on its way."""
        decoupled = None
        for number, step in list(self._waiting.items()):
            if self._run.ended or not self.tensors.keys() >= set(step.inputs.values()) - self._run.absent:
                continue
            try:
                model = self._run.find(step.model, step.version)
                if model.config.decoupled:
                    decoupled = decoupled or (number, step, model)
                else:
                    self._begin(number, step, model)
            except ServeError as error:
                self._run.fail(number, step, error)
        if self._run.ended or self._asked:
            return
        if decoupled:
            try:
                self._run.split(self)
                self._begin(*decoupled)
            except ServeError as error:
                self._run.fail(*decoupled[:2], error)
        elif not self._waiting:
            self.is_complete = True
            self._run.advance()

    def answered(self, number: int, tensors: Arrays) -> None:
        del self._asked[number]
        self.tensors.update(tensors)
        self.advance()

    def part(self, tensors: Arrays) -> None:
        """Of a response of the decoupled step."""
        self._run.begin({**self.tensors, **tensors}, dict(self._waiting))

    def end(self) -> None:
        self._asked.clear()
        self._run.ended_split(self)

    def fail(self, number: int, step: Step, error: Exception) -> None:
        self._asked.pop(number, None)
        self._run.fail(number, step, error)

    def cancel(self) -> None:
        for model, request in self._asked.values():
            model.cancel(request)
        self._asked.clear()

    @property
    def gone(self) -> bool:
        return self._run.ended

    def _begin(self, number: int, step: Step, model: Model) -> None:
        del self._waiting[number]
        asked = self._run.request
        inputs = {name: self.tensors[tensor] for name, tensor in step.inputs.items() if tensor in self.tensors}
        request = request_of(
            model, inputs, list(step.outputs), _kept, _StepReply(self, number, step), deadline_ns=asked.deadline_ns,
            timeout_us=asked.timeout_us, priority=asked.priority, sequence=asked.sequence, request_id=asked.id,
            parameters=asked.parameters)
        self._asked[number] = (model, request)
        model.submit(request)


class _StepReply:
    """Takes the responses of a step: a StreamReply."""

    def __init__(self, flow: _Flow, number: int, step: Step) -> None:
        self._flow, self._number, self._step = flow, number, step

    @property
    def gone(self) -> bool:
        return self._flow.gone

    def send(self, response: Arrays) -> None:
        try:
            self._flow.answered(self._number, _named(self._step, response))
        except ExecutionError as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self._flow.fail(self._number, self._step, error)

    def part(self, response: Arrays) -> None:
        try:
            self._flow.part(_named(self._step, response))
        except ExecutionError as error:
            self.fail(error)

    def end(self) -> None:
        self._flow.end()


def _named(step: Step, outputs: Arrays) -> dict[str, NDArray[Any]]:
    """A step's outputs by the names of the ensemble. Raises ExecutionError: one is missing."""
    if missing := sorted(step.outputs.keys() - outputs.keys()):
        raise ExecutionError(f"it gave no output '{missing[0]}'")
    return {tensor: outputs[name] for name, tensor in step.outputs.items()}


def _kept(computed: Arrays) -> Arrays:
    """The outputs of a step: an engine's are valid only until it executes again."""
    return {name: np.array(array) for name, array in computed.items()}
