"""Sequence batcher: requests with one correlation id go to one instance, one after the other, with state between them.

A sequence has a slot at an instance from its first request to its last, or until it has been idle for too long;
sequences without a slot wait in a backlog. Requests of several sequences share a batch.

In iterative sequences a request is a sequence of its own, executed as often as its model asks for. Between two
executions other requests may join its batch and leave it.
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

from infer_server.batching.event_loop import RequestQueue
from infer_server.batching.request import Arrays, InSequence, Request, SequenceCache
from infer_server.errors import InvalidRequestError, ServeError
from infer_server.workers import post

_LARGEST_ID = (1 << 64) - 1         # largest correlation id of the protocols
_MAX_CHECKS = 50                    # maximum number of checks for idle sequences within the idle timeout


class ControlKind(Enum):
    """Kind of a control input; the values are those of config.pbtxt."""
    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"            # always true: batches contain no empty slots
    END = "CONTROL_SEQUENCE_END"
    CORRELATION = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True)
class ControlInput:
    """Control input, which the server adds to each request."""
    name: str
    kind: ControlKind
    dtype: np.dtype[Any]
    false: Any = 0
    true: Any = 1

    def value(self, position: InSequence, model: str) -> Any:
        """Return the value for a request. Raises InvalidRequestError if the model cannot take its correlation id."""
        if self.kind is ControlKind.CORRELATION:
            if self.dtype.hasobject:
                return str(position.id).encode()
            datatype = self.dtype.name.upper()          # the protocol's name of an integer type
            if isinstance(position.id, str):
                raise InvalidRequestError(f"sequence batching control '{self.name}' data-type is 'BYTES', but model "
                                          f"'{model}' expects '{datatype}': the correlation id {position.id!r} is text")
            if not np.can_cast(np.min_scalar_type(position.id), self.dtype, "safe"):
                raise InvalidRequestError(f"the correlation id {position.id!r} does not fit into {datatype}, which "
                                          f"model '{model}' expects for the sequence batching control '{self.name}'")
            return position.id
        is_true = {ControlKind.START: position.start, ControlKind.END: position.end, ControlKind.READY: True}[self.kind]
        return self.true if is_true else self.false


@dataclass(frozen=True)
class SequenceState:
    """Implicit state: an output that is an input of the sequence's next request."""
    input: str
    output: str
    initial: NDArray[Any]


@dataclass(frozen=True)
class SequencePolicy:
    """Sequence batching policy: sequence_batching of config.pbtxt."""
    idle_us: int                                # time after which an idle sequence ends
    controls: tuple[ControlInput, ...]
    states: tuple[SequenceState, ...]           # states that are copied from one request to the next
    candidates: int                             # slots for sequences at one instance
    batched: bool
    iterative: bool = False                     # the model may reschedule requests
    growing: tuple[SequenceState, ...] = ()     # states that grow in place (use_growable_memory)
    capacity: int = 0                           # largest number of tokens of these


@dataclass(eq=False)
class _Sequence:
    """Sequence of requests with one correlation id."""
    id: int | str
    states: dict[str, NDArray[Any]]             # by input name
    cache: SequenceCache | None = None          # states that grow in place
    queue: RequestQueue | None = None           # queue of its instance; None while it is in the backlog
    waiting: deque[Request] = field(default_factory=deque)
    executing: Request | None = None
    used_ns: int = 0
    ended: bool = False                         # True once its last request has arrived
    next: _Sequence | None = None               # sequence with the same id, which begins when this one is done

    def release(self) -> None:
        """Free the memory of states that grow in place."""
        if self.cache:
            self.cache.release()


class Sequences:
    """Sequence batcher of a model. Belongs to the event loop."""

    def __init__(self, model: str, policy: SequencePolicy, queues: Sequence[RequestQueue],
                 loop: asyncio.AbstractEventLoop, refuse: Callable[[Request, ServeError], None]) -> None:
        """Distribute sequences over the instances' queues; `refuse` fails a request that its queue rejected."""
        self._model, self._policy, self._queues, self._loop = model, policy, queues, loop
        self._refuse = refuse
        self._active: dict[int | str, _Sequence] = {}
        self._by_request: dict[Request, _Sequence] = {}
        self._used_slots = {queue: 0 for queue in queues}
        self._backlog: deque[_Sequence] = deque()
        self._assigning = False
        self._timer: asyncio.TimerHandle | None = None
        # Generated ids count down from the largest one, because clients usually count up.
        ids = [control.dtype for control in policy.controls if control.kind is ControlKind.CORRELATION]
        self._largest_id = int(min((np.iinfo(dtype).max for dtype in ids if not dtype.hasobject), default=_LARGEST_ID))
        self._generated_id = 1

        self.waiting = 0                                    # requests that are not queued yet; read by any thread

    @property
    def may_reschedule(self) -> bool:
        """True if a request that was submitted before may still be queued. From any thread."""
        return bool(self._by_request) if self._policy.iterative else self.waiting > 0

    @property
    def iterative(self) -> bool:
        return self._policy.iterative

    def submit(self, request: Request) -> None:
        """Add a request, which is queued when it is its turn. Raises InvalidRequestError if it has no sequence."""
        if self._policy.iterative:
            request.sequence = InSequence(request.sequence.id if request.sequence else self._free_id(), start=True)
        position = request.sequence
        if position is None:
            raise InvalidRequestError(f"inference request to model '{self._model}' must specify a non-zero or "
                                      "non-empty correlation ID (sequence_id)")
        if request.items != 1:
            raise InvalidRequestError(f"inference request to model '{self._model}' must specify batch-size 1 due to "
                                      "requirements of sequence batcher")
        for control in self._policy.controls:
            control.value(position, self._model)
        sequence = self._active.get(position.id)
        if position.start and not (sequence and self._policy.iterative):    # iterative requests of one id wait in line
            sequence = self._begin(position.id)
        elif sequence is None or (sequence.ended and not self._policy.iterative):
            raise InvalidRequestError(f"inference request for sequence {position.id} to model '{self._model}' must "
                                      "specify the START flag on the first request of the sequence")
        sequence.waiting.append(request)
        self.waiting += 1
        self._by_request[request] = sequence
        sequence.ended = position.end or self._policy.iterative
        self._advance(sequence)

    def _free_id(self) -> int:
        """Return an id that no open request has."""
        self._generated_id = self._generated_id - 1 or self._largest_id
        while self._generated_id in self._active:
            self._generated_id = self._generated_id - 1 or self._largest_id
        return self._generated_id

    def withdraw(self, request: Request) -> bool:
        """Remove a request that is not queued yet; return False if it is queued, executing or unknown."""
        sequence = self._by_request.get(request)
        if sequence is None or sequence.executing is request:
            return False
        self.finished(request)
        return True

    def reschedule(self, request: Request) -> None:
        """Queue a request again, unless it has ended. Raises ServeError.

        Called on the thread that executed it, so that it can be part of that thread's next batch.
        """
        sequence = self._by_request.get(request)
        queue = sequence.queue if sequence else None
        if queue is None:
            return
        assert request.sequence is not None
        request.sequence = replace(request.sequence, start=False)
        request.inputs = {**request.inputs, **self._controls(request.sequence)}
        queue.batcher.submit(request)
        post(self._loop, queue.watch_expiry, request)

    def finished(self, request: Request) -> None:
        """Note that a request has ended in any way, and queue the next one of its sequence."""
        sequence = self._by_request.pop(request, None)
        if sequence is None:
            return
        if sequence.executing is request:
            sequence.executing = None
        else:
            sequence.waiting.remove(request)
            self.waiting -= 1
        self._advance(sequence)

    def close(self) -> None:
        """Forget all open sequences and stop the idle timer. Call this when no more requests come."""
        for sequence in self._active.values():
            sequence.release()
        self._active.clear()
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _begin(self, identity: int | str) -> _Sequence:
        """Start a sequence; an older one with the same id first finishes its requests."""
        sequence = _Sequence(identity, {state.input: state.initial for state in self._policy.states},
                             SequenceCache() if self._policy.growing else None)
        previous, self._active[identity] = self._active.get(identity), sequence
        if previous:
            previous.ended, previous.next = True, sequence
            self._release_if_done(previous)
        else:
            self._backlog.append(sequence)
            self._assign_slots()
        if self._timer is None:
            self._check_after(self._policy.idle_us * 1000)
        return sequence

    def _check_after(self, ns: int) -> None:
        """Schedule the next check for idle sequences, which visits all of them, so that its rate is limited."""
        least_ns = self._policy.idle_us * 1000 // _MAX_CHECKS
        self._timer = self._loop.call_later(max(ns, least_ns) / 1e9, self._end_idle)

    def _assign_slots(self) -> None:
        """Assign free slots to sequences of the backlog.

        Nested calls return at once: a sequence whose requests are all refused releases its slot within the loop, and
        recursion would be as deep as the backlog.
        """
        if self._assigning:
            return
        self._assigning = True
        try:
            while self._backlog:
                queue = min(self._queues, key=self._used_slots.__getitem__)
                if self._used_slots[queue] >= self._policy.candidates:
                    return
                sequence = self._backlog.popleft()
                sequence.queue = queue
                self._used_slots[queue] += 1
                self._advance(sequence)
        finally:
            self._assigning = False

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
                del self._by_request[request]
                self._refuse(request, error)
        self._release_if_done(sequence)

    def _prepare(self, request: Request, sequence: _Sequence) -> None:
        """Add control inputs and states to a request, and arrange that its state outputs are kept."""
        assert request.sequence is not None
        request.inputs = {**request.inputs, **self._controls(request.sequence), **sequence.states}
        request.cache = sequence.cache
        if self._policy.states:
            # States may grow; requests share a batch only if their states have equal shapes.
            request.shape_key = request.shape_key, tuple(state.shape for state in sequence.states.values())
            encode = request.encode

            def save_states(computed: Arrays) -> Any:
                sequence.states = {state.input: computed[state.output].copy() for state in self._policy.states}
                return encode(computed)

            request.encode = save_states

    def _controls(self, position: InSequence) -> Arrays:
        lead = (1, 1) if self._policy.batched else (1,)
        return {control.name: np.full(lead, control.value(position, self._model), control.dtype)
                for control in self._policy.controls}

    def _release_if_done(self, sequence: _Sequence) -> None:
        if not sequence.ended or sequence.waiting or sequence.executing:
            return
        if sequence.queue is None and (sequence.next or sequence not in self._backlog):
            return                              # an older sequence with this id has not finished
        if self._active.get(sequence.id) is sequence:
            del self._active[sequence.id]
        if sequence.queue:
            sequence.release()
            self._used_slots[sequence.queue] -= 1
            sequence.queue = None
            if sequence.next:
                self._backlog.appendleft(sequence.next)
            self._assign_slots()
        else:
            self._backlog.remove(sequence)

    def _end_idle(self) -> None:
        """End the sequences that have been idle for too long."""
        self._timer = None
        now_ns = time.monotonic_ns()
        limit_ns = now_ns - self._policy.idle_us * 1000
        first_ns = now_ns               # earliest last use among the remaining sequences
        for sequence in list(self._active.values()):
            if sequence.waiting or sequence.executing:
                continue
            if sequence.used_ns <= limit_ns:
                sequence.ended = True
                self._release_if_done(sequence)
            else:
                first_ns = min(first_ns, sequence.used_ns)
        if self._active:
            self._check_after(first_ns - limit_ns)
