"""Sequences: requests of one correlation id go to one instance, one after the other, with the state between them.

A sequence has a place at an instance from its first request to its last, or until it has been idle for too long; those
that find no place wait for one. Requests of several sequences share a batch.

In iterative sequences a request is a sequence of its own, executed as often as its model asks for. Between two
executions others may join its batch and leave it.
"""
from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.queue import RequestQueue
from infer_server.batching.request import Arrays, InSequence, Request
from infer_server.errors import InvalidRequestError, ServeError
from infer_server.workers import post

_LARGEST_ID = (1 << 64) - 1         # that the protocols have
_LOOKS = 50                         # for idle sequences, at most, in the time that one may be idle


class ControlKind(Enum):
    """What a control tensor tells; the values are those of config.pbtxt."""
    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"            # always: a batch holds requests only
    END = "CONTROL_SEQUENCE_END"
    CORRELATION = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True)
class Control:
    """An input that the server adds."""
    name: str
    kind: ControlKind
    dtype: np.dtype[Any]
    false: Any = 0
    true: Any = 1

    def value(self, at: InSequence, model: str) -> Any:
        """Raises InvalidRequestError: the model takes no such correlation id."""
        if self.kind is ControlKind.CORRELATION:
            if self.dtype.hasobject:
                return str(at.id).encode()
            datatype = self.dtype.name.upper()          # of an integer, as the protocol calls it
            if isinstance(at.id, str):
                raise InvalidRequestError(f"sequence batching control '{self.name}' data-type is 'BYTES', but model "
                                          f"'{model}' expects '{datatype}': the correlation id {at.id!r} is text")
            if not np.can_cast(np.min_scalar_type(at.id), self.dtype, "safe"):
                raise InvalidRequestError(f"the correlation id {at.id!r} is no {datatype}, which model '{model}' "
                                          f"expects for the sequence batching control '{self.name}'")
            return at.id
        holds = {ControlKind.START: at.start, ControlKind.END: at.end, ControlKind.READY: True}[self.kind]
        return self.true if holds else self.false


@dataclass(frozen=True)
class State:
    """An output that is the input of the sequence's next request."""
    input: str
    output: str
    initial: NDArray[Any]


@dataclass(frozen=True)
class SequencePolicy:
    idle_us: int                                # after which a sequence ends by itself
    controls: tuple[Control, ...]
    states: tuple[State, ...]
    candidates: int                             # sequences that have a place at one instance
    batched: bool
    iterative: bool = False                     # a request is executed until its model has done with it


@dataclass(eq=False)
class _Sequence:
    id: int | str
    states: dict[str, NDArray[Any]]             # by the names of inputs
    queue: RequestQueue | None = None           # of its instance; None: it waits for a place
    waiting: deque[Request] = field(default_factory=deque)
    executing: Request | None = None
    used_ns: int = 0
    ended: bool = False                         # its last request has come
    next: _Sequence | None = None               # of the same id, which begins when this one is done


class Sequences:
    """Belongs to the event loop."""

    def __init__(self, model: str, policy: SequencePolicy, queues: Sequence[RequestQueue],
                 loop: asyncio.AbstractEventLoop, refuse: Callable[[Request, ServeError], None]) -> None:
        """queues: of the instances, one each. refuse: ends a request that its queue did not take."""
        self._model, self._policy, self._queues, self._loop = model, policy, queues, loop
        self._refuse = refuse
        self._active: dict[int | str, _Sequence] = {}
        self._of_request: dict[Request, _Sequence] = {}
        self._places = {queue: 0 for queue in queues}       # that are taken
        self._without_place: deque[_Sequence] = deque()
        self._gives_places = False
        self._timer: asyncio.TimerHandle | None = None
        # What sequences that no client has named are called, from the top down: clients count upwards.
        ids = [control.dtype for control in policy.controls if control.kind is ControlKind.CORRELATION]
        self._top = int(min((np.iinfo(dtype).max for dtype in ids if not dtype.hasobject), default=_LARGEST_ID))
        self._unnamed = 1

        self.waiting = 0                                    # requests that are in no queue yet; read by any thread

    @property
    def comes_again(self) -> bool:
        """Whether a request may yet be queued that was submitted before. From any thread."""
        return bool(self._of_request) if self._policy.iterative else self.waiting > 0

    @property
    def iterative(self) -> bool:
        return self._policy.iterative

    def submit(self, request: Request) -> None:
        """Queues a request when its turn has come. Raises InvalidRequestError: it belongs to no sequence."""
        if self._policy.iterative:
            request.sequence = InSequence(request.sequence.id if request.sequence else self._free_id(), start=True)
        at = request.sequence
        if at is None:
            raise InvalidRequestError(f"inference request to model '{self._model}' must specify a non-zero or "
                                      "non-empty correlation ID (sequence_id)")
        if request.items != 1:
            raise InvalidRequestError(f"inference request to model '{self._model}' must specify batch-size 1 due to "
                                      "requirements of sequence batcher")
        for control in self._policy.controls:
            control.value(at, self._model)
        sequence = self._active.get(at.id)
        if at.start and not (sequence and self._policy.iterative):      # of these the one of the same id ends first
            sequence = self._begin(at.id)
        elif sequence is None or (sequence.ended and not self._policy.iterative):
            raise InvalidRequestError(f"inference request for sequence {at.id} to model '{self._model}' must "
                                      "specify the START flag on the first request of the sequence")
        sequence.waiting.append(request)
        self.waiting += 1
        self._of_request[request] = sequence
        sequence.ended = at.end or self._policy.iterative
        self._advance(sequence)

    def _free_id(self) -> int:
        """One that no open request has."""
        self._unnamed = self._unnamed - 1 or self._top
        while self._unnamed in self._active:
            self._unnamed = self._unnamed - 1 or self._top
        return self._unnamed

    def withdraw(self, request: Request) -> bool:
        """Takes out a request whose turn has not come; False: it has, or there is no such request."""
        sequence = self._of_request.get(request)
        if sequence is None or sequence.executing is request:
            return False
        self.finished(request)
        return True

    def again(self, request: Request) -> None:
        """Queues a request once more, on the thread that executed it: so it is there when the next batch is formed.
        Does nothing if it has ended. Raises ServeErrors."""
        sequence = self._of_request.get(request)
        queue = sequence.queue if sequence else None
        if queue is None:
            return
        assert request.sequence is not None
        request.sequence = replace(request.sequence, start=False)
        request.inputs = {**request.inputs, **self._controls(request.sequence)}
        queue.batcher.submit(request)
        post(self._loop, queue.watch_expiry, request)

    def finished(self, request: Request) -> None:
        """To be called when a request has ended in whatever way: the next of its sequence takes its turn."""
        sequence = self._of_request.pop(request, None)
        if sequence is None:
            return
        if sequence.executing is request:
            sequence.executing = None
        else:
            sequence.waiting.remove(request)
            self.waiting -= 1
        self._advance(sequence)

    def close(self) -> None:
        """To be called when no more requests come: forgets the sequences that were not ended, and does not wait until
        they have been idle for too long."""
        self._active.clear()
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _begin(self, identity: int | str) -> _Sequence:
        """A new sequence; one of the same id has no more requests, and those that it has come first."""
        sequence = _Sequence(identity, {state.input: state.initial for state in self._policy.states})
        before, self._active[identity] = self._active.get(identity), sequence
        if before:
            before.ended, before.next = True, sequence
            self._release_if_done(before)
        else:
            self._without_place.append(sequence)
            self._give_places()
        if self._timer is None:
            self._look_after(self._policy.idle_us * 1000)
        return sequence

    def _look_after(self, ns: int) -> None:
        """Sets the timer for the next look at what is idle, so many nanoseconds from now. It is not set more often than
        _LOOKS times in the longest idle time, for a look goes through all sequences."""
        least_ns = self._policy.idle_us * 1000 // _LOOKS
        self._timer = self._loop.call_later(max(ns, least_ns) / 1e9, self._end_idle)

    def _give_places(self) -> None:
        """One that ends at once, for its queue takes none of its requests, gives its place back meanwhile: to go on
        from there would nest as deep as there are sequences that wait."""
        if self._gives_places:
            return
        self._gives_places = True
        try:
            while self._without_place:
                queue = min(self._queues, key=self._places.__getitem__)
                if self._places[queue] >= self._policy.candidates:
                    return
                sequence = self._without_place.popleft()
                sequence.queue = queue
                self._places[queue] += 1
                self._advance(sequence)
        finally:
            self._gives_places = False

    def _advance(self, sequence: _Sequence) -> None:
        sequence.used_ns = time.monotonic_ns()
        while sequence.queue and sequence.waiting and sequence.executing is None:
            request = sequence.executing = sequence.waiting.popleft()
            self.waiting -= 1
            self._prepare(request, sequence)
            try:
                sequence.queue.submit(request)
            except ServeError as error:
                sequence.executing = None
                del self._of_request[request]
                self._refuse(request, error)
        self._release_if_done(sequence)

    def _prepare(self, request: Request, sequence: _Sequence) -> None:
        """Adds what clients do not send, and keeps the states of the outputs."""
        assert request.sequence is not None
        request.inputs = {**request.inputs, **self._controls(request.sequence), **sequence.states}
        if self._policy.states:
            # A state may have grown: who has one of another shape does not fit into the batch.
            request.shape_key = request.shape_key, tuple(state.shape for state in sequence.states.values())
            encode = request.encode

            def keep(computed: Arrays) -> Any:
                sequence.states = {state.input: computed[state.output].copy() for state in self._policy.states}
                return encode(computed)

            request.encode = keep

    def _controls(self, at: InSequence) -> Arrays:
        lead = (1, 1) if self._policy.batched else (1,)
        return {control.name: np.full(lead, control.value(at, self._model), control.dtype)
                for control in self._policy.controls}

    def _release_if_done(self, sequence: _Sequence) -> None:
        if not sequence.ended or sequence.waiting or sequence.executing:
            return
        if sequence.queue is None and (sequence.next or sequence not in self._without_place):
            return                              # it is the turn of the next one when its own has come
        if self._active.get(sequence.id) is sequence:
            del self._active[sequence.id]
        if sequence.queue:
            self._places[sequence.queue] -= 1
            sequence.queue = None
            if sequence.next:
                self._without_place.appendleft(sequence.next)
            self._give_places()
        else:
            self._without_place.remove(sequence)

    def _end_idle(self) -> None:
        """Ends the sequences whose clients have sent nothing for too long."""
        self._timer = None
        now_ns = time.monotonic_ns()
        limit_ns = now_ns - self._policy.idle_us * 1000
        first_ns = now_ns               # when the one of those that stay was used that will be idle for too long first
        for sequence in list(self._active.values()):
            if sequence.waiting or sequence.executing:
                continue
            if sequence.used_ns <= limit_ns:
                sequence.ended = True
                self._release_if_done(sequence)
            else:
                first_ns = min(first_ns, sequence.used_ns)
        if self._active:
            self._look_after(first_ns - limit_ns)
