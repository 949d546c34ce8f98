"""A request's way through the steps of an ensemble: each begins as soon as the tensors are there that it reads.

A decoupled step has any number of responses. For each of them a flow of its own goes through the steps behind it, and
ends in a response of the ensemble; those are sent in the order of the step's.

What a step leaves out is left out of the inputs of those behind it, and of the response. The parameters of its response
are the ensemble's, and where they say another place in a sequence (sequence_id, sequence_start, sequence_end), that is
the place of the steps that read its tensors.

Models that have a batch axis and models that have none may follow each other: see `_with_batch`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.request import NO_MORE, Arrays, Outputs, Request, StreamReply, parameters_of
from infer_server.config.config import ModelConfig, TensorSpec
from infer_server.config.sequences import sequence_of
from infer_server.config.signature import fits
from infer_server.config.steps import Step
from infer_server.errors import ExecutionError, NotServedError, ServeError
from infer_server.protocol.parameters import Parameters
from infer_server.repository.kinds.local import Find, request_of
from infer_server.repository.model import Model


class Run:
    """Belongs to the event loop."""

    def __init__(self, request: Request, config: ModelConfig, find: Find,
                 finish: Callable[[Request, Any], None]) -> None:
        """config: the ensemble's. finish: takes the response, an error, or NO_MORE."""
        self.request, self.find = request, find
        self._config = config
        self.ended = False
        self._finish = finish
        self._flows: dict[_Flow, None] = {}             # in the order of their responses
        self._split: set[_Flow] = set()                 # those whose last step is decoupled, and has not ended
        self._streams = False                           # there was one

    def begin(self) -> None:
        """Begins with the inputs, and the steps that the outputs asked for need."""
        inputs = dict(self.request.inputs)
        tensors = _Tensors(inputs, {spec.name for spec in self._config.inputs} - inputs.keys(),
                           dict.fromkeys(inputs, self._config.batched))
        steps = dict(enumerate(self._config.steps))
        if len(self.request.outputs) < len(self._config.outputs):       # who asks for all has all of them executed
            steps = _needed(steps, self.request.outputs)
        self.add(_Flow(self, tensors, steps))

    def add(self, flow: _Flow) -> None:
        if not self.ended:
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


class _Tensors:
    """Those that are there, by the ensemble's names, and what the responses with them said."""

    def __init__(self, arrays: dict[str, NDArray[Any]], absent: set[str], batched: dict[str, bool]) -> None:
        """absent: those that there will not be. batched: whether each of the arrays has a batch axis."""
        self._arrays, self._absent, self._batched = arrays, absent, batched
        self._makers: dict[str, int] = {}               # the step that made each
        self._said: dict[int, Parameters] = {}          # by the steps

    def has(self, names: Iterable[str]) -> bool:
        """Whether all are there that will be."""
        return self._arrays.keys() | self._absent >= set(names)

    def add(self, number: int, step: Step, outputs: Arrays, batched: bool) -> None:
        """A step's response. batched: its model has a batch axis."""
        for name, tensor in step.outputs.items():
            if name in outputs:
                self._arrays[tensor], self._makers[tensor], self._batched[tensor] = outputs[name], number, batched
            else:
                self._absent.add(tensor)
        if parameters := parameters_of(outputs):
            self._said[number] = parameters

    def added(self, number: int, step: Step, outputs: Arrays, batched: bool) -> _Tensors:
        """Others, with those of a response."""
        others = _Tensors(dict(self._arrays), set(self._absent), dict(self._batched))
        others._makers, others._said = dict(self._makers), dict(self._said)
        others.add(number, step, outputs, batched)
        return others

    def read(self, names: Mapping[str, str], specs: Sequence[TensorSpec], batched: bool) -> dict[str, NDArray[Any]]:
        """Those that are there, by the names that their reader has for them, and with a batch axis if it has one."""
        return {name: self._arrays[tensor] if self._batched[tensor] == batched
                else _with_batch(self._arrays[tensor], batched,
                                 next((spec.dims for spec in specs if spec.name == name), ()))     # it may have none
                for name, tensor in names.items() if tensor in self._arrays}

    def said_with(self, names: Iterable[str]) -> Parameters:
        """The parameters that came with these; of steps that differ, the last one's."""
        makers = {self._makers[name] for name in names if name in self._makers}
        return _merged({number: said for number, said in self._said.items() if number in makers})

    def outputs(self, config: ModelConfig, asked: Sequence[str]) -> Arrays:
        """The ensemble's."""
        specs = [spec.in_model for spec in config.outputs]
        arrays = self.read({name: name for name in asked}, specs, config.batched)
        left_out = not self._absent.isdisjoint(asked)
        return Outputs(arrays, _merged(self._said)) if self._said or left_out else arrays


def _needed(steps: Mapping[int, Step], tensors: Iterable[str]) -> dict[int, Step]:
    """The steps that make these tensors, and those that make what they read."""
    needed, wanted = set[int](), set(tensors)
    while more := {number for number, step in steps.items()
                   if number not in needed and not wanted.isdisjoint(step.outputs.values())}:
        needed |= more
        wanted.update(tensor for number in more for tensor in steps[number].inputs.values())
    return {number: step for number, step in steps.items() if number in needed}


def _with_batch(array: NDArray[Any], batched: bool, dims: tuple[int, ...]) -> NDArray[Any]:
    """A tensor as its reader has it, where only one of its maker and its reader has a batch axis, as in Triton.

    A whole tensor that fits is one item of a batch; one that has an axis more is a batch already. A batch that fits is
    a whole tensor; else one of a single item is that item. What does not fit then is refused by the reader.
    """
    if fits(array.shape, dims):
        return array[None] if batched else array
    return array[0] if not batched and array.shape[:1] == (1,) else array


def _merged(said: Mapping[int, Parameters]) -> Parameters:
    return {name: value for number in sorted(said) for name, value in said[number].items()}


class _Flow:
    """Tensors, and the steps that wait for them."""

    def __init__(self, run: Run, tensors: _Tensors, waiting: dict[int, Step]) -> None:
        self.is_complete = False
        self._run, self._tensors, self._waiting = run, tensors, waiting
        self._asked: dict[int, tuple[Model, Request]] = {}

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
            self.end(number, step)
            return
        model, request = self._asked.pop(number)
        if request.trace:
            request.trace.ended()
        self._tensors.add(number, step, outputs, model.config.batched)
        self.advance()

    def part(self, number: int, step: Step, outputs: Arrays) -> None:
        """Of a response of the decoupled step: a flow of its own, through the steps behind it."""
        if not self._is_split(number, step):
            return
        tensors = self._tensors.added(number, step, outputs, self._asked[number][0].config.batched)
        self._run.add(_Flow(self._run, tensors, dict(self._waiting)))

    def end(self, number: int, step: Step) -> None:
        if not self._is_split(number, step):
            return
        if trace := self._asked[number][1].trace:
            trace.ended()
        self._asked.clear()
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
        self._flow.end(self._number, self._step)


def _kept(computed: Arrays) -> Arrays:
    """The outputs of a step: an engine's are valid only until it executes again."""
    return Outputs({name: np.array(array) for name, array in computed.items()}, parameters_of(computed))
