"""EnsembleRun a request through the steps of an ensemble; each step begins as soon as its input tensors are available.

A decoupled step has any number of responses. Each of them starts a flow of its own through the following steps, which
ends in one response of the ensemble; these are sent in the order of the step's responses.

An output that a step omits is missing from the inputs of the following steps and from the response. The parameters of a
step's response become the ensemble's; if they contain sequence parameters (sequence_id, sequence_start, sequence_end),
these apply to the steps that read its tensors.

Models with and without a batch axis may follow each other: see ensemble_tensors.

Tensors are accounted for from the start of the step that makes them until the end of their flow. A decoupled step is
paused while the flows of its responses hold too many bytes or exceed max_inflight_requests.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.batching.request import NO_MORE, Arrays, FlowWindow, Outputs, Request, StreamReply, parameters_of
from infer_server.config.config import ModelConfig
from infer_server.config.sequences import sequence_of
from infer_server.config.steps import EnsembleStep
from infer_server.errors import ExecutionError, NotServedError, ServeError
from infer_server.repository.kinds.ensemble_tensors import Tensors, size_of
from infer_server.repository.kinds.local import Find, TensorMemory, request_of
from infer_server.repository.model import Model

_RESPONSE_BYTES = 4096          # overhead of a response in bytes, in addition to its tensors


class EnsembleRun:
    """Execution of one request by an ensemble. Belongs to the event loop."""

    def __init__(self, request: Request, config: ModelConfig, find: Find,
                 finish: Callable[[Request, Any], None], memory: TensorMemory) -> None:
        """Create the execution of a request; `finish` receives its response, an exception, or NO_MORE."""
        self.request, self.find, self.memory = request, find, memory
        self._config = config
        self.ended = False
        self._finish = finish
        self._flows: dict[_Flow, None] = {}             # in the order of their responses
        self._split: set[_Flow] = set()                 # flows whose decoupled step has not ended
        self._streams = False                           # True once a decoupled step has begun
        self._alive: dict[_Flow, None] = {}             # all flows that hold tensors
        self._unconsumed: deque[_Flow] = deque()           # flows whose responses the caller has not consumed yet
        if request.window:                              # the ensemble is itself a step of an ensemble
            request.on_consumed = self._consumed

    def begin(self) -> None:
        """Start the first flow with the request's inputs and the steps that the requested outputs need."""
        inputs = dict(self.request.inputs)
        tensors = Tensors(inputs, {spec.name for spec in self._config.inputs} - inputs.keys(),
                           dict.fromkeys(inputs, self._config.batched))
        steps = dict(enumerate(self._config.steps))
        if len(self.request.outputs) < len(self._config.outputs):       # otherwise all steps are executed
            steps = _needed(steps, self.request.outputs)
        self.add(_Flow(self, tensors, steps))

    def add(self, flow: _Flow) -> None:
        if not self.ended:
            self._flows[flow] = self._alive[flow] = None
            flow.advance()

    def cancel(self) -> None:
        """End the execution and release all tensors; breaks reference cycles."""
        self.ended, self.request.on_consumed = True, None
        for flow in self._alive:
            flow.cancel()
        for flows in (self._flows, self._split, self._alive, self._unconsumed):
            flows.clear()

    @property
    def window(self) -> FlowWindow:
        """Window of the ensemble's decoupled steps: its own limits, within those of its caller."""
        outer, own = self.request.window, FlowWindow(self._config.max_inflight, self.memory.window_bytes)
        if outer is None:
            return own
        return FlowWindow(min(filter(None, (outer.responses, own.responses)), default=0), min(outer.size, own.size))

    def _consumed(self) -> None:
        """Release the oldest response after the caller has consumed it."""
        if self._unconsumed:
            self._unconsumed.popleft().end()

    def forget(self, flow: _Flow) -> None:
        """Remove a flow that no longer holds tensors."""
        self._alive.pop(flow, None)

    def split(self, flow: _Flow) -> None:
        """Replace a flow, whose next step is decoupled, by one flow for each of the step's responses.

        Raises
        ------
        NotServedError
            The client's call allows a single response.
        """
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
        """Send the responses of complete flows, in order."""
        while not self.ended and self._flows and (first := next(iter(self._flows))).is_complete:
            del self._flows[first]
            try:
                result = self.request.encode(first.outputs(self._config, self.request.outputs))
            except Exception as error:          # depends on the request's protocol
                self._end(error)
                return
            if not self._streams:
                self._end(result)
                return
            if self.request.window:
                self._unconsumed.append(first)
                self.request.part(result)
            else:
                self.request.part(result)
                first.end()
        if not self.ended and not self._flows and not self._split:
            self._end(NO_MORE)

    def fail(self, number: int, step: EnsembleStep, error: Exception) -> None:
        kind = type(error) if isinstance(error, ServeError) else ExecutionError
        self._end(kind(f"step {number} ('{step.model}'): {error}"))

    def _end(self, result: Any) -> None:
        if not self.ended:
            self.cancel()
            self._finish(self.request, result)


def _needed(steps: Mapping[int, EnsembleStep], tensors: Iterable[str]) -> dict[int, EnsembleStep]:
    """Return the steps that these tensors depend on, directly or not."""
    needed, names = set[int](), set(tensors)
    while more := {number for number, step in steps.items()
                   if number not in needed and not names.isdisjoint(step.outputs.values())}:
        needed |= more
        names.update(tensor for number in more for tensor in steps[number].inputs.values())
    return {number: step for number, step in steps.items() if number in needed}


class _Flow:
    """Set of available tensors and the steps that wait for more of them."""

    def __init__(self, run: EnsembleRun, tensors: Tensors, waiting: dict[int, EnsembleStep],
                 parent: _Flow | None = None, on_consumed: Callable[[], None] | None = None) -> None:
        """Create a flow.

        Parameters
        ----------
        run : EnsembleRun
            Execution that the flow belongs to.
        tensors : Tensors
            Tensors that are available at the start.
        waiting : dict of int to EnsembleStep
            Steps to execute, by index; modified.
        parent : _Flow, optional
            Flow whose decoupled step produced the response that starts this one.
        on_consumed : callable, optional
            Function that lets the decoupled step continue; see `Request.on_consumed`.
        """
        self.is_complete = False
        self._run, self._tensors, self._waiting = run, tensors, waiting
        self._parent, self._on_consumed = parent, on_consumed
        self._children = 0                              # child flows that hold tensors
        self._has_split = False                         # True after the decoupled last step has ended
        self._in_flight: dict[int, tuple[Model, Request]] = {}
        self._releases: list[Callable[[], None]] = []   # functions that release the accounted bytes

    def hold(self, size: int) -> None:
        """Account for `size` bytes until the flow ends. Raises MemoryLimitError."""
        if size > 0:
            self._releases.append(self._run.memory.hold(size))

    def _release(self) -> None:
        for release in self._releases:
            release()
        self._releases.clear()

    def end(self) -> None:
        """Release the tensors and let the decoupled step that started the flow continue."""
        self._release()
        self._run.forget(self)
        parent, on_consumed, self._parent, self._on_consumed = self._parent, self._on_consumed, None, None
        if on_consumed:
            on_consumed()
        if parent:
            parent.child_ended()

    def child_ended(self) -> None:
        self._children -= 1
        if self._has_split and not self._children:
            self.end()

    def outputs(self, config: ModelConfig, requested: Sequence[str]) -> Arrays:
        return self._tensors.outputs(config, requested)

    def advance(self) -> None:
        """Begin the steps whose inputs are available; a decoupled one only when no other step is executing."""
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
        if self._run.ended or self._in_flight:
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

    def answered(self, number: int, step: EnsembleStep, outputs: Arrays) -> None:
        if self._run.has_split(self):           # the step's ensemble was reloaded and is no longer decoupled
            self.part(number, step, outputs)
            self.step_ended(number, step)
            return
        model, request = self._in_flight.pop(number)
        if request.trace:
            request.trace.ended()
        try:
            self.hold(size_of(outputs) - _expected_bytes(model, step, request.items))
        except ServeError as error:
            self._run.fail(number, step, error)
            return
        self._tensors.add(number, step, outputs, model.config.batched)
        self.advance()

    def part(self, number: int, step: EnsembleStep, outputs: Arrays) -> None:
        """Start a child flow for one response of the decoupled step."""
        if not self._is_split(number, step):
            return
        model, request = self._in_flight[number]
        tensors = self._tensors.added(number, step, outputs, model.config.batched)
        flow = _Flow(self._run, tensors, dict(self._waiting), self, request.on_consumed)
        try:
            flow.hold(_RESPONSE_BYTES + size_of(outputs))
        except ServeError as error:
            self._run.fail(number, step, error)
            return
        self._children += 1
        self._run.add(flow)

    def step_ended(self, number: int, step: EnsembleStep) -> None:
        if not self._is_split(number, step):
            return
        if trace := self._in_flight[number][1].trace:
            trace.ended()
        self._in_flight.clear()
        self._has_split = True
        if not self._children:
            self.end()
        self._run.ended_split(self)

    def _is_split(self, number: int, step: EnsembleStep) -> bool:
        """Return True if the step has several responses; fail the request if its model became decoupled meanwhile."""
        if not (split := self._run.has_split(self)):
            self.fail(number, step, ExecutionError("its model became decoupled meanwhile; send the request again"))
        return split

    def fail(self, number: int, step: EnsembleStep, error: Exception) -> None:
        self._in_flight.pop(number, None)
        self._run.fail(number, step, error)

    def cancel(self) -> None:
        for model, request in self._in_flight.values():
            model.cancel(request)
        self._in_flight.clear()
        self._release()
        self._parent = self._on_consumed = None

    @property
    def gone(self) -> bool:
        return self._run.ended

    def _begin(self, number: int, step: EnsembleStep, model: Model) -> None:
        del self._waiting[number]
        outer = self._run.request
        inputs = self._tensors.read(step.inputs, model.config.inputs, model.config.batched)
        sequence = sequence_of(self._tensors.parameters_with(step.inputs.values()), outer.sequence)
        request = request_of(
            model, inputs, list(step.outputs), _copied, _StepReply(self, number, step), deadline_ns=outer.deadline_ns,
            timeout_us=outer.timeout_us, priority=outer.priority, sequence=sequence, request_id=outer.id,
            parameters=outer.parameters)
        if model.is_decoupled:
            request.window = self._run.window
        else:
            self.hold(_expected_bytes(model, step, request.items))
        self._in_flight[number] = (model, request)
        if outer.trace:
            request.follow(outer.trace.step(), model.name, model.version)
        model.submit(request)


class _StepReply:
    """StreamReply that passes the responses of a step to its flow."""

    def __init__(self, flow: _Flow, number: int, step: EnsembleStep) -> None:
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


def _expected_bytes(model: Model, step: EnsembleStep, items: int) -> int:
    """Return the size of a step's outputs in bytes, counting only shapes that are known before execution."""
    return sum((items if model.config.batched else 1) * spec.item_bytes
               for spec in model.config.outputs if spec.name in step.outputs)


def _copied(computed: Arrays) -> Arrays:
    """Copy the outputs of a step: an engine's outputs are valid only until its next execution."""
    return Outputs({name: np.array(array) for name, array in computed.items()}, parameters_of(computed))
