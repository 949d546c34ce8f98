"""Tests of sequences without a server, on a clock that the test sets.

They cover the end of idle sequences, the requests that share a batch, and requests that wait for a slot.
"""
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infer_server.batching import sequences
from infer_server.batching.batcher import Batcher
from infer_server.batching.policy import BatchPolicy, QueuePolicy
from infer_server.batching.request import InSequence, Request
from infer_server.batching.sequences import SequencePolicy, Sequences, SequenceState
from infer_server.errors import DeadlineExceededError, InvalidRequestError


class Clock:
    """Clock with a single timer."""

    def __init__(self) -> None:
        self.ns = self.looks = 0
        self._due: tuple[float, Callable[[], None]] | None = None

    def call_later(self, delay: float, callback: Callable[[], None]) -> object:
        self._due = (self.ns + delay * 1e9, callback)
        return self._due

    def wait_until(self, seconds: float) -> None:
        while self._due and self._due[0] <= seconds * 1e9:
            (due, callback), self._due = self._due, None
            self.ns, self.looks = round(due), self.looks + 1
            callback()
        self.ns = round(seconds * 1e9)


class Queue:
    """Queue of an instance; without a batcher, it executes requests at once."""

    def __init__(self, batcher: Batcher | None = None) -> None:
        self._batcher = batcher

    def submit(self, request: Request) -> None:
        if self._batcher is not None:
            self._batcher.submit(request)


def test_a_sequence_ends_when_it_has_been_idle_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, queues, policy = Clock(), [Queue()], SequencePolicy(5_000_000, (), (), candidates=1000, batched=True)
    monkeypatch.setattr(sequences, "time", SimpleNamespace(monotonic_ns=lambda: clock.ns))
    of: Any = Sequences("m", policy, queues, clock, lambda request, error: None)   # type: ignore[arg-type]

    def ask(identity: int, start: bool = False) -> None:
        reply: Any = None
        request = Request({}, 1, (), lambda computed: None, reply, sequence=InSequence(identity, start))
        of.submit(request)
        of.finished(request)

    ask(1, start=True)
    clock.wait_until(0.3)
    ask(1)
    for identity in range(2, 500):
        clock.wait_until(0.3 + identity / 1000)
        ask(identity, start=True)
    clock.wait_until(5.2)
    ask(2)
    clock.wait_until(5.9)
    for identity in (1, 499):
        with pytest.raises(InvalidRequestError, match="must specify the START flag"):
            ask(identity)
    ask(2)
    assert clock.looks <= 50, "a look costs all sequences"


def test_sequences_whose_states_are_of_unequal_shapes_share_no_batch() -> None:
    policy = SequencePolicy(5_000_000, (), (SequenceState("past", "now", np.zeros((1, 1))),), candidates=4,
                            batched=True)
    batcher = Batcher("m", BatchPolicy(4), QueuePolicy(), lambda refused, why: None)
    queues: Any = [Queue(batcher)]
    of = Sequences("m", policy, queues, Clock(), lambda request, error: None)     # type: ignore[arg-type]

    def ask(identity: int, start: bool = False) -> Request:
        reply: Any = None
        request = Request({"x": np.zeros((1, 1))}, 1, (), lambda computed: None, reply,
                          sequence=InSequence(identity, start))
        of.submit(request)
        return request

    def answer(request: Request, extent: int) -> None:
        request.encode({"now": np.zeros((1, extent))})
        of.finished(request)

    first = ask(1, start=True)
    assert batcher.take() == [first]
    answer(first, 2)
    grown, *others = ask(1), ask(2, start=True), ask(3, start=True)
    assert batcher.take() == [grown] and batcher.take() == others
    answer(grown, 3)
    answer(others[0], 2)
    answer(others[1], 2)
    alike = [ask(2), ask(3)]
    longer = ask(1)
    assert batcher.take() == alike and batcher.take() == [longer]


def test_any_number_of_sequences_that_wait_may_turn_out_to_be_too_late_at_once() -> None:
    class Late(Queue):
        def submit(self, request: Request) -> None:
            if request.sequence and request.sequence.id > 1:        # type: ignore[operator]    # all are numbers
                raise DeadlineExceededError("it is late")

    refused: list[Request] = []
    queues, policy = [Late()], SequencePolicy(5_000_000, (), (), candidates=1, batched=True)
    of: Any = Sequences("m", policy, queues, Clock(), lambda late, _: refused.append(late))   # type: ignore[arg-type]
    reply: Any = None
    first, *others = [Request({}, 1, (), lambda computed: None, reply, sequence=InSequence(identity, True, True))
                      for identity in range(1, 2000)]
    for request in (first, *others):
        of.submit(request)
    assert of.waiting == len(others)
    of.finished(first)
    assert refused == others and not of.waiting and not of.may_reschedule


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("withdrawn", [0, 1, 2])
def test_a_sequence_begins_when_one_of_the_same_id_is_done(end: bool, withdrawn: int) -> None:
    policy = SequencePolicy(5_000_000, (), (), candidates=4, batched=True)
    batcher = Batcher("m", BatchPolicy(4), QueuePolicy(), lambda refused, why: None)
    queues: Any = [Queue(batcher)]
    of = Sequences("m", policy, queues, Clock(), lambda request, error: None)     # type: ignore[arg-type]
    reply: Any = None
    requests = [Request({}, 1, (), lambda computed: None, reply, sequence=at)
                for at in [InSequence(1, start=True), InSequence(1, end=end)] * 3]
    for request in requests[:4]:
        of.submit(request)
    for request in requests[2:2 + withdrawn]:
        assert of.withdraw(request)
    for request in requests[4:]:
        of.submit(request)
    for request in (*requests[:2], *requests[2 + withdrawn:]):
        assert batcher.take() == [request] and not len(batcher)
        of.finished(request)
    assert of.waiting == 0 and bool(of._active) is not end
    assert list(of._used_slots.values()) == [0 if end else 1] and not of._backlog
