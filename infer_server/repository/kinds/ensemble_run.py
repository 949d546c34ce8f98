"""A request's way through the steps of an ensemble: each begins as soon as the tensors are there that it reads.

A decoupled step has any number of responses. For each of them a flow of its own goes through the steps behind it, and
ends in a response of the ensemble; those are sent in the order of the step's.

What a step leaves out is left out of the inputs of those behind it, and of the response. The parameters of its response
are the ensemble's, and where they say another place in a sequence (sequence_id, sequence_start, sequence_end), that is
the place of the steps that read its tensors.

Models that have a batch axis and models that have none may follow each other: see ensemble_tensors.

Tensors are counted from when a step makes them, or begins to, until their flow ends. A decoupled step is held back
while the flows of its responses hold too much, or are more than max_inflight_requests.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.batching.request import NO_MORE, Arrays, Outputs, Request, StreamReply, Window, parameters_of
from infer_server.config.config import ModelConfig
from infer_server.config.sequences import sequence_of
from infer_server.config.steps import Step
from infer_server.errors import ExecutionError, NotServedError, ServeError
from infer_server.repository.kinds.ensemble_tensors import Tensors, size_of
from infer_server.repository.kinds.local import Find, TensorMemory, request_of
from infer_server.repository.model import Model

_RESPONSE_BYTES = 4096          # of a response, beside its tensors


class Run:
    """Belongs to the event loop."""

    def __init__(self, request: Request, config: ModelConfig, find: Find,
                 finish: Callable[[Request, Any], None], memory: TensorMemory) -> None:
        """config: the ensemble's. finish: takes the response, an error, or NO_MORE."""
        self.request, self.find, self.memory = request, find, memory
        self._config = config
        self.ended = False
        self._finish = finish
        self._flows: dict[_Flow, None] = {}             # in the order of their responses
        self._split: set[_Flow] = set()                 # those whose last step is decoupled, and has not ended
        self._streams = False                           # there was one
        self._alive: dict[_Flow, None] = {}             # that hold tensors, those above among them
        self._untaken: deque[_Flow] = deque()           # whose responses were handed on, and are not taken yet
        if request.window:                              # it is a step of another ensemble
            request.taken = self._taken

    def begin(self) -> None:
        """Begins with the inputs, and the steps that the outputs asked for need."""
        inputs = dict(self.request.inputs)
        tensors = Tensors(inputs, {spec.name for spec in self._config.inputs} - inputs.keys(),
                           dict.fromkeys(inputs, self._config.batched))
        steps = dict(enumerate(self._config.steps))
        if len(self.request.outputs) < len(self._config.outputs):       # who asks for all has all of them executed
            steps = _needed(steps, self.request.outputs)
        self.add(_Flow(self, tensors, steps))

    def add(self, flow: _Flow) -> None:
        if not self.ended:
            self._flows[flow] = self._alive[flow] = None
            flow.advance()

    def cancel(self) -> None:
        """End it, and let go of all tensors: nothing may refer to it in a circle."""
        self.ended, self.request.taken = True, None
        for flow in self._alive:
            flow.cancel()
        for flows in (self._flows, self._split, self._alive, self._untaken):
            flows.clear()

    @property
    def window(self) -> Window:
        """Return the window of the ensemble's decoupled steps: its own setting, within that of its caller."""
        asked, own = self.request.window, Window(self._config.max_inflight, self.memory.window_bytes)
        if asked is None:
            return own
        return Window(min(filter(None, (asked.responses, own.responses)), default=0), min(asked.size, own.size))

    def _taken(self) -> None:
        """Let go of the oldest response that was handed on."""
        if self._untaken:
            self._untaken.popleft().end()

    def forget(self, flow: _Flow) -> None:
        """To be called when a flow holds no tensors any more."""
        self._alive.pop(flow, None)

    def split(self, flow: _Flow) -> None:
        """The flow's last step is decoupled: flows for its responses take its place. Raises NotServedError."""
        if not isinstance(self.request.reply, StreamReply):
            raise NotServedError("the step is decoupled: ask for the ensemble in a stream (ModelStreamInfer)")
        self._streams = True
        del self._flows[flow]
        self._split.add(flow)

    def has_split(self, flow: _Flow) -> bool:
        return flow in self._split

    def ended_split(self, flow: _Flow) -> None:
        self._split.discard(flow)
        self.advance()

    def advance(self) -> None:
        """Sends what is complete."""
        while not self.ended and self._flows and (first := next(iter(self._flows))).is_complete:
            del self._flows[first]
            try:
                result = self.request.encode(first.outputs(self._config, self.request.outputs))
            except Exception as error:          # of whatever protocol it came by
                self._end(error)
                return
            if not self._streams:
                self._end(result)
                return
            if self.request.window:
                self._untaken.append(first)
                self.request.part(result)
            else:
                self.request.part(result)
                first.end()
        if not self.ended and not self._flows and not self._split:
            self._end(NO_MORE)

    def fail(self, number: int, step: Step, error: Exception) -> None:
        kind = type(error) if isinstance(error, ServeError) else ExecutionError
        self._end(kind(f"step {number} ('{step.model}'): {error}"))

    def _end(self, result: Any) -> None:
        if not self.ended:
            self.cancel()
            self._finish(self.request, result)


def _needed(steps: Mapping[int, Step], tensors: Iterable[str]) -> dict[int, Step]:
    """The steps that make these tensors, and those that make what they read."""
    needed, wanted = set[int](), set(tensors)
    while more := {number for number, step in steps.items()
                   if number not in needed and not wanted.isdisjoint(step.outputs.values())}:
        needed |= more
        wanted.update(tensor for number in more for tensor in steps[number].inputs.values())
    return {number: step for number, step in steps.items() if number in needed}


class _Flow:
    """Tensors, and the steps that wait for them."""

    def __init__(self, run: Run, tensors: Tensors, waiting: dict[int, Step], parent: _Flow | None = None,
                 taken: Callable[[], None] | None = None) -> None:
        """parent: the flow whose decoupled step made the response that this one begins with. taken: has that step go
        on; see Request."""
        self.is_complete = False
        self._run, self._tensors, self._waiting = run, tensors, waiting
        self._parent, self._on_taken = parent, taken
        self._children = 0                              # that hold tensors
        self._has_split = False                         # its last step has ended, which is decoupled
        self._asked: dict[int, tuple[Model, Request]] = {}
        self._releases: list[Callable[[], None]] = []   # of the bytes that it holds

    def hold(self, size: int) -> None:
        """Count bytes until it ends. Raises MemoryLimitError."""
        if size > 0:
            self._releases.append(self._run.memory.hold(size))

    def _release(self) -> None:
        for release in self._releases:
            release()
        self._releases.clear()

    def end(self) -> None:
        """Let go of the tensors; the step that made the first of them may make more."""
        self._release()
        self._run.forget(self)
        parent, taken, self._parent, self._on_taken = self._parent, self._on_taken, None, None
        if taken:
            taken()
        if parent:
            parent.child_ended()

    def child_ended(self) -> None:
        self._children -= 1
        if self._has_split and not self._children:
            self.end()

    def outputs(self, config: ModelConfig, asked: Sequence[str]) -> Arrays:
        return self._tensors.outputs(config, asked)

    def advance(self) -> None:
        """Begins the steps whose inputs are there; a decoupled one when nothing else is on its way."""
        decoupled = None
        for number, step in list(self._waiting.items()):
            if self._run.ended or not self._tensors.has(step.inputs.values()):
                continue
            try:
                model = self._run.find(step.model, step.version)
                if model.is_decoupled:
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

    def answered(self, number: int, step: Step, outputs: Arrays) -> None:
        if self._run.has_split(self):           # the step is an ensemble that has become one of single responses
            self.part(number, step, outputs)
            self.step_ended(number, step)
            return
        model, request = self._asked.pop(number)
        if request.trace:
            request.trace.ended()
        try:
            self.hold(size_of(outputs) - _expected_bytes(model, step, request.items))
        except ServeError as error:
            self._run.fail(number, step, error)
            return
        self._tensors.add(number, step, outputs, model.config.batched)
        self.advance()

    def part(self, number: int, step: Step, outputs: Arrays) -> None:
        """Of a response of the decoupled step: a flow of its own, through the steps behind it."""
        if not self._is_split(number, step):
            return
        model, request = self._asked[number]
        tensors = self._tensors.added(number, step, outputs, model.config.batched)
        flow = _Flow(self._run, tensors, dict(self._waiting), self, request.taken)
        try:
            flow.hold(_RESPONSE_BYTES + size_of(outputs))
        except ServeError as error:
            self._run.fail(number, step, error)
            return
        self._children += 1
        self._run.add(flow)

    def step_ended(self, number: int, step: Step) -> None:
        if not self._is_split(number, step):
            return
        if trace := self._asked[number][1].trace:
            trace.ended()
        self._asked.clear()
        self._has_split = True
        if not self._children:
            self.end()
        self._run.ended_split(self)

    def _is_split(self, number: int, step: Step) -> bool:
        """False: an ensemble became decoupled while it was asked, for a model of its steps is another; the request
        ends."""
        if not (split := self._run.has_split(self)):
            self.fail(number, step, ExecutionError("its model became decoupled meanwhile; ask once more"))
        return split

    def fail(self, number: int, step: Step, error: Exception) -> None:
        self._asked.pop(number, None)
        self._run.fail(number, step, error)

    def cancel(self) -> None:
        for model, request in self._asked.values():
            model.cancel(request)
        self._asked.clear()
        self._release()
        self._parent = self._on_taken = None

    @property
    def gone(self) -> bool:
        return self._run.ended

    def _begin(self, number: int, step: Step, model: Model) -> None:
        del self._waiting[number]
        asked = self._run.request
        inputs = self._tensors.read(step.inputs, model.config.inputs, model.config.batched)
        sequence = sequence_of(self._tensors.said_with(step.inputs.values()), asked.sequence)
        request = request_of(
            model, inputs, list(step.outputs), _kept, _StepReply(self, number, step), deadline_ns=asked.deadline_ns,
            timeout_us=asked.timeout_us, priority=asked.priority, sequence=sequence, request_id=asked.id,
            parameters=asked.parameters)
        if model.is_decoupled:
            request.window = self._run.window
        else:
            self.hold(_expected_bytes(model, step, request.items))
        self._asked[number] = (model, request)
        if asked.trace:
            request.follow(asked.trace.step(), model.name, model.version)
        model.submit(request)


class _StepReply:
    """Takes the responses of a step: a StreamReply."""

    def __init__(self, flow: _Flow, number: int, step: Step) -> None:
        self._flow, self._number, self._step = flow, number, step

    @property
    def gone(self) -> bool:
        return self._flow.gone

    def send(self, response: Arrays) -> None:
        self._flow.answered(self._number, self._step, response)

    def fail(self, error: Exception) -> None:
        self._flow.fail(self._number, self._step, error)

    def part(self, response: Arrays, is_last: bool = False) -> None:
        self._flow.part(self._number, self._step, response)

    def end(self) -> None:
        self._flow.step_ended(self._number, self._step)


def _expected_bytes(model: Model, step: Step, items: int) -> int:
    """Return the bytes of a step's outputs, as far as their shapes are known before it is executed."""
    return sum((items if model.config.batched else 1) * spec.item_bytes
               for spec in model.config.outputs if spec.name in step.outputs)


def _kept(computed: Arrays) -> Arrays:
    """The outputs of a step: an engine's are valid only until it executes again."""
    return Outputs({name: np.array(array) for name, array in computed.items()}, parameters_of(computed))
