"""Tests of the queue, on a clock that moves only when a test moves it."""
from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from infer_server.batching.batcher import Batcher
from infer_server.batching.policy import BatchPolicy, Priorities, QueuePolicy
from infer_server.batching.request import Request
from infer_server.errors import DeadlineExceededError, QueueFullError, UnavailableError
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.awaited_reply import AwaitedReply


class Clock:
    now_ns = 1_000_000

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def request(loop: asyncio.AbstractEventLoop, items: int = 1, timeout_us: int = 0, deadline_ns: int = 0) -> Request:
    return Request({"x": np.zeros((items, 1))}, items, (), lambda outputs: b"", AwaitedReply(loop), timeout_us,
                   deadline_ns=deadline_ns)


def batcher(batching: BatchPolicy | None = None, **queueing: int | bool) -> tuple[Batcher, Clock, list[Request]]:
    clock, refused = Clock(), list[Request]()
    queue_policy = QueuePolicy(**queueing)      # type: ignore[arg-type]    # each test gives the fields their own types
    made = Batcher("m", batching or BatchPolicy(8), queue_policy, lambda requests, _: refused.extend(requests),
                   clock_ns=clock)
    return made, clock, refused


def test_batches_are_taken_in_order_of_arrival(loop: asyncio.AbstractEventLoop) -> None:
    queue, _, _ = batcher(BatchPolicy(2))
    requests = [request(loop) for _ in range(3)]
    for one in requests:
        queue.submit(one)
    assert queue.take() == requests[:2]
    assert queue.take() == requests[2:]
    assert len(queue) == 0


def test_the_highest_priority_is_taken_first_and_each_level_has_its_policy(loop: asyncio.AbstractEventLoop) -> None:
    policies = Priorities((QueuePolicy(max_queue_size=1), QueuePolicy(default_timeout_us=10, delay_expired=True)), 2)
    clock = Clock()
    queue = Batcher("m", BatchPolicy(1), policies, lambda requests, _: None, clock_ns=clock)
    usual, late, urgent, unknown = (request(loop) for _ in range(4))
    late.priority, urgent.priority, unknown.priority = 2, 1, 9
    queue.submit(late)
    clock.now_ns += 10_001
    for one in (usual, urgent, unknown):
        queue.submit(one)
    beyond = request(loop)
    beyond.priority = 1
    with pytest.raises(QueueFullError):
        queue.submit(beyond)
    assert queue.withdraw(unknown) and not queue.withdraw(unknown)
    assert [queue.take() for _ in range(3)] == [[urgent], [usual], [late]]


def test_a_full_queue_refuses_and_says_how_many_wait(loop: asyncio.AbstractEventLoop) -> None:
    queue, _, _ = batcher(max_queue_size=2)
    queue.submit(request(loop))
    queue.submit(request(loop))
    with pytest.raises(QueueFullError, match="Exceeds maximum queue size: 2 requests"):
        queue.submit(request(loop))


def test_an_expired_request_is_refused_and_the_others_are_executed(loop: asyncio.AbstractEventLoop) -> None:
    queue, clock, refused = batcher(allow_timeout_override=True)
    late, patient = request(loop, timeout_us=10), request(loop)
    queue.submit(late)
    queue.submit(patient)
    clock.now_ns += 10_001
    assert queue.take() == [patient]
    assert refused == [late]


def test_an_expired_request_goes_behind_all_others_if_it_is_to_be_delayed(loop: asyncio.AbstractEventLoop) -> None:
    queue, clock, refused = batcher(BatchPolicy(1), default_timeout_us=10, delay_expired=True)
    late, fresh = request(loop), request(loop)
    queue.submit(late)
    clock.now_ns += 10_001
    queue.submit(fresh)
    assert [queue.take(), queue.take()] == [[fresh], [late]]
    assert refused == []


def test_one_that_waits_alone_is_executed_where_it_is_found(loop: asyncio.AbstractEventLoop) -> None:
    queue, _, _ = batcher()
    alone = request(loop, items=3)
    queue.submit(alone)
    assert queue.take_short(lambda items: items < 3) == [] and queue.take_short(lambda items: items == 3) == [alone]
    assert queue.take_short(lambda items: True) == []
    queue.submit(request(loop))
    queue.close()
    assert queue.take_short(lambda items: True) == []


def test_not_before_it_may_be_nor_after(loop: asyncio.AbstractEventLoop) -> None:
    queue, clock, _ = batcher(BatchPolicy(8, max_queue_delay_us=10))
    waits, late = request(loop), request(loop)
    queue.submit(waits)
    assert queue.take_short(lambda items: True) == []
    clock.now_ns += 10_000
    assert queue.take_short(lambda items: True) == [waits]
    queue, clock, refused = batcher(default_timeout_us=30)
    queue.submit(late)
    clock.now_ns += 30_001
    assert queue.take_short(lambda items: True) == [] and refused == [late]


def test_a_withdrawn_request_is_never_taken(loop: asyncio.AbstractEventLoop) -> None:
    queue, _, _ = batcher()
    gone, stays = request(loop), request(loop)
    queue.submit(gone)
    queue.submit(stays)
    assert queue.withdraw(gone)
    assert queue.take() == [stays]
    assert not queue.withdraw(stays), "it is executing already"


def test_a_closed_queue_gives_out_what_it_has_at_once_and_takes_nothing_more(loop: asyncio.AbstractEventLoop) -> None:
    queue, _, _ = batcher(BatchPolicy(8, max_queue_delay_us=1_000_000))
    waiting = request(loop)
    queue.submit(waiting)
    queue.close()
    with pytest.raises(UnavailableError, match="takes no more requests"):
        queue.submit(request(loop))
    assert queue.take() == [waiting]
    assert queue.take() is None


def test_idle_instances_share_what_waits(loop: asyncio.AbstractEventLoop) -> None:
    queue, _, _ = batcher()
    taken: list[list[Request] | None] = []
    instances = [threading.Thread(target=lambda: taken.append(queue.take())) for _ in range(3)]
    for instance in instances:
        instance.start()
    while queue._idle < 3:
        time.sleep(0.001)
    requests = [request(loop) for _ in range(7)]
    for one in requests:
        queue.submit(one)
    queue.wake()
    for instance in instances:
        instance.join(TIMEOUT_SECS)
    assert sorted(len(batch or ()) for batch in taken) == [2, 2, 3]
    assert {id(one) for batch in taken for one in batch or ()} == {id(one) for one in requests}


def test_an_idle_instance_sleeps_until_it_is_woken(loop: asyncio.AbstractEventLoop) -> None:
    queue, _, _ = batcher()
    taken: list[list[Request] | None] = []
    instance = threading.Thread(target=lambda: taken.append(queue.take()))
    instance.start()
    first = request(loop)
    queue.submit(first)
    queue.wake()
    instance.join(TIMEOUT_SECS)
    assert taken == [[first]]


def test_a_batch_may_wait_for_company_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    queue, _, _ = batcher(BatchPolicy(2, max_queue_delay_us=(1 << 64) - 1))
    taken: list[list[Request] | None] = []
    instance = threading.Thread(target=lambda: taken.append(queue.take()))
    requests = [request(loop), request(loop)]
    queue.submit(requests[0])
    instance.start()
    while instance.is_alive() and not queue._changed._waiters:      # type: ignore[attr-defined]
        time.sleep(0.001)
    queue.submit(requests[1])
    queue.wake()
    instance.join(TIMEOUT_SECS)
    assert taken == [requests]


def test_a_request_has_not_responded_for_longer_than_until_its_execution_ended(loop: asyncio.AbstractEventLoop) -> None:
    """The event loop may record a response late, so a response time never lies after the execution's end."""
    several, one = request(loop), request(loop)
    several.responded_ns = 5
    assert [several.responding_ns(ended_ns) for ended_ns in (3, 5, 9)] == [0, 0, 4] and one.responding_ns(9) == 0


def test_a_request_that_cannot_be_answered_in_time_is_refused_when_it_comes(loop: asyncio.AbstractEventLoop) -> None:
    queue, clock, _ = batcher()
    queue.record_time(items=1, ns=1000)
    with pytest.raises(DeadlineExceededError, match="the request was not executed"):
        queue.submit(request(loop, deadline_ns=clock.now_ns + 999))
    queue.submit(request(loop, deadline_ns=clock.now_ns + 1000))
    assert len(queue) == 1


def test_a_deadline_that_comes_too_near_is_refused_without_an_instance(loop: asyncio.AbstractEventLoop) -> None:
    queue, clock, refused = batcher()
    queue.record_time(items=1, ns=1000)
    late = request(loop, deadline_ns=clock.now_ns + 5000)
    queue.submit(late)
    queue.submit(request(loop))
    due_ns = queue.next_expiry_ns()
    assert due_ns == clock.now_ns + 4001
    clock.now_ns = due_ns - 1
    queue.expire()
    assert refused == []
    clock.now_ns = due_ns
    queue.expire()
    assert refused == [late] and len(queue) == 1
    assert queue.next_expiry_ns() is None


def test_what_is_given_up_is_never_taken(loop: asyncio.AbstractEventLoop) -> None:
    queue, clock, refused = batcher()
    queue.record_time(items=8, ns=500)
    requests = [request(loop, deadline_ns=clock.now_ns + 600 + i) for i in range(24)]
    for one in requests:
        queue.submit(one)
    taken = queue.take()
    assert taken == requests[:8], "nobody is late yet"
    clock.now_ns += 50
    assert queue.take() == requests[16:] and refused == requests[8:16]
    assert len(queue) == 0


def test_under_overload_with_deadlines_what_is_executed_is_answered_in_time(loop: asyncio.AbstractEventLoop) -> None:
    """The load is three times the capacity; first come, first served would answer hardly any request in time."""
    queue, clock, _ = batcher()
    batch_ns, patience_ns, due_ns = 100_000_000, 240_000_000, Clock.now_ns
    batches = executed = in_time = 0
    for items in (1, 8):                # as a warm-up does
        queue.record_time(items, batch_ns)
    queue.submit(request(loop))
    while batches < 40:
        taken = queue.take() or []
        done_ns = clock.now_ns + batch_ns
        while due_ns < done_ns:
            clock.now_ns = due_ns
            with suppress(DeadlineExceededError):
                queue.submit(request(loop, deadline_ns=due_ns + patience_ns))
            due_ns += batch_ns // 24
        clock.now_ns = done_ns
        queue.record_time(len(taken), batch_ns)
        batches, executed = batches + 1, executed + len(taken)
        in_time += sum(one.deadline_ns >= done_ns for one in taken)
    assert in_time >= 0.9 * executed and executed >= 0.9 * 8 * batches


def test_many_requests_are_withdrawn_as_fast_as_they_came(loop: asyncio.AbstractEventLoop) -> None:
    """Searching the queue from its front for each request took five seconds; now all take 1/20 of the limit."""
    queue, clock, _ = batcher(default_timeout_us=1_000_000)
    requests = [request(loop, deadline_ns=clock.now_ns + 10**9 + i) for i in range(20_000)]
    for one in requests:
        queue.submit(one)
    begin = time.thread_time()
    assert all(queue.withdraw(one) for one in reversed(requests))
    assert time.thread_time() - begin < 1
    assert len(queue) == 0 and queue.next_expiry_ns() is None
