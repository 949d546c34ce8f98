"""Tests of the rate limiter between instances that share resources, alone and in a server."""
from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Thread

import numpy as np
import pytest
import tritonclient.grpc as triton

from infer_server.batching.batcher import Batcher
from infer_server.batching.policy import BatchPolicy, QueuePolicy
from infer_server.batching.request import Request
from infer_server.config.groups import RateLimit, Resource
from infer_server.errors import ModelConfigError
from infer_server.rate_limiter import RateGate, RateLimiter
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.awaited_reply import AwaitedReply
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import serving

R, S, T = Resource("R", False), Resource("S", True), Resource("T", True)


def gate(limiter: RateLimiter, priority: int = 1, woken: list[int] | None = None, **needs: int) -> RateGate:
    number = len(limiter._gates)
    limit = RateLimit({{"R": R, "S": S, "T": T}[name]: count for name, count in needs.items()}, priority)
    (created,) = limiter.gates([limit], [lambda: woken.append(number) if woken is not None else None])
    return created


def test_of_those_who_always_wait_each_executes_as_its_priority_says() -> None:
    limiter, executed = RateLimiter({}), Counter[int]()
    gates = [gate(limiter, priority, R=2) for priority in (1, 2, 4)]
    for _ in range(70):
        (entered,) = [number for number, each in enumerate(gates) if each.enter()]
        executed[entered] += 1
        assert not any(each.enter() for each in gates), "there is nothing left"
        gates[entered].leave()
    assert [executed[number] for number in range(3)] == [40, 20, 10]


def test_there_is_as_much_as_is_given_or_as_the_most_demanding_needs() -> None:
    limiter = RateLimiter({"S": 3})
    some, more, other = gate(limiter, R=2), gate(limiter, R=3), gate(limiter, S=2)
    assert some.enter() and not more.enter() and other.enter()
    some.leave()
    assert more.enter()
    assert gate(limiter, S=1).enter() and not gate(limiter, S=1).enter()
    with pytest.raises(ModelConfigError, match="it needs 4 of 'S', and there are 3: give --rate-limit-resource S:4"):
        gate(limiter, S=4)


def test_who_needs_much_is_not_overtaken_for_ever_and_who_needs_nothing_of_it_does_not_wait() -> None:
    woken: list[int] = []
    limiter = RateLimiter({"R": 2})
    small, large, late, apart = (
        gate(limiter, woken=woken, **needs) for needs in ({"R": 1}, {"R": 2}, {"R": 1}, {"S": 1}))
    assert small.enter() and not large.enter()
    assert not late.enter(), "one of R is free, and is what the large one waits for"
    assert apart.enter()
    small.leave()
    assert woken == [1, 2] and large.enter() and not late.enter()
    large.leave()
    assert not large.in_line and late.enter()


def test_what_executes_with_other_resources_changes_nobodys_turn() -> None:
    limiter, executed = RateLimiter({}), Counter[int]()
    busy, *gates = gate(limiter, R=1), gate(limiter, S=1), gate(limiter, 4, S=1)
    assert gates[0].enter() and not gates[1].enter()
    running = 0
    for _ in range(50):
        for _ in range(20):
            assert busy.enter()
            busy.leave()
        executed[running] += 1
        gates[running].leave()
        if not gates[running].enter():
            running = 1 - running
            assert gates[running].enter()
    assert [executed[number] for number in range(2)] == [40, 10]
    neighbour = gate(limiter, R=1)
    assert busy.enter() and not neighbour.enter()
    busy.leave()
    assert not busy.enter() and neighbour.enter(), "it has waited longer"
    neighbour.leave()
    assert not neighbour.enter() and busy.enter()


def test_who_needs_two_resources_does_not_wait_until_all_turns_of_one_of_them_are_made_up_for() -> None:
    limiter = RateLimiter({})
    first = gate(limiter, R=1)
    for _ in range(100):
        assert first.enter()
        first.leave()
    apart = gate(limiter, S=1)
    assert apart.enter()
    both = gate(limiter, R=1, S=1)
    assert not both.enter()
    apart.leave()
    assert apart.enter(), "it was there first, and is as far now as what both need"
    apart.leave()
    assert not apart.enter() and both.enter()


def test_who_steps_aside_or_is_gone_holds_nobody_up() -> None:
    limiter = RateLimiter({"R": 2})
    small, large, late = gate(limiter, R=1), gate(limiter, R=2), gate(limiter, R=1)
    assert small.enter() and not large.enter() and not late.enter()
    large.step_aside()
    assert late.enter()
    large.close()


class Asking:
    """Instances that compete for resources.

    Two instances of one queue need R and S; another instance holds R, and one of lower precedence needs T.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, batching: BatchPolicy, *others: Resource) -> None:
        """Start nothing yet. others: further resources that the first instance needs."""
        self._loop, self._limiter = loop, RateLimiter({})
        self.other = gate(self._limiter, R=1)
        assert self.other.enter()
        self.now_ns = 1
        self.batcher = Batcher("m", batching, QueuePolicy(default_timeout_us=1_000_000_000), lambda refused, why: None,
                               2, lambda: self.now_ns)
        limits = [RateLimit({R: 1, **dict.fromkeys(others, 1)}), RateLimit({S: 1})]
        self.gates = self._limiter.gates(limits, [self.batcher.wake_all] * 2)
        self.behind = gate(self._limiter, T=1)
        self.took = [Queue[int](), Queue[int]()]        # how many requests, by instance
        self._threads = [Thread(target=self._run, args=(number,), daemon=True) for number in range(2)]

    def start(self, number: int) -> None:
        self._threads[number].start()

    def ask(self) -> Request:
        request = Request({"x": np.zeros((1, 1))}, 1, (), lambda outputs: b"", AwaitedReply(self._loop))
        self.batcher.submit(request)
        self.batcher.wake()
        return request

    def ended(self, number: int) -> bool:
        self._threads[number].join(TIMEOUT_SECS)
        return not self._threads[number].is_alive()

    def _run(self, number: int) -> None:
        while (batch := self.batcher.take(self.gates[number])) is not None:
            self.took[number].put(len(batch))
            self.gates[number].leave()
        self.gates[number].close()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    created = asyncio.new_event_loop()
    yield created
    created.close()


def test_an_instance_that_is_refused_leaves_the_request_to_one_that_needs_something_else(
        loop: asyncio.AbstractEventLoop) -> None:
    asking = Asking(loop, BatchPolicy(1))
    asking.start(0)
    assert eventually(lambda: asking.batcher._idle == 1)
    asking.start(1)
    assert eventually(lambda: asking.batcher._idle == 2)
    for _ in range(2):                          # the first of them waits longest, and is woken first
        asking.ask()
        assert asking.took[1].get(timeout=TIMEOUT_SECS) == 1
    asking.batcher.close()
    assert asking.ended(0) and asking.ended(1)


def test_who_stands_in_line_may_be_withdrawn_wait_for_a_fuller_batch_or_be_unloaded(
        loop: asyncio.AbstractEventLoop) -> None:
    asking = Asking(loop, BatchPolicy(2, frozenset(), max_queue_delay_us=3_600_000_000))
    (line,) = asking.gates[:1]
    asking.start(0)
    requests = [asking.ask(), asking.ask()]
    assert eventually(lambda: line.in_line)
    assert asking.batcher.withdraw(requests[0])
    asking.other.leave()                        # which wakes it: it waits for a second request, out of the line
    assert eventually(lambda: not line.in_line) and asking.other.enter()
    asking.ask()
    assert eventually(lambda: line.in_line)
    asking.batcher.close()
    assert asking.took[0].empty(), "what was accepted waits for its turn"
    asking.other.leave()
    assert asking.took[0].get(timeout=TIMEOUT_SECS) == 2 and asking.ended(0)


@pytest.mark.parametrize("how", ["withdrawn", "expired"])
def test_who_has_nothing_to_execute_any_more_holds_nobody_up_until_it_is_its_turn(
        loop: asyncio.AbstractEventLoop, how: str) -> None:
    asking = Asking(loop, BatchPolicy(1), T)
    asking.start(0)
    request = asking.ask()
    assert eventually(lambda: asking.gates[0].in_line) and not asking.behind.enter()
    if how == "withdrawn":
        assert asking.batcher.withdraw(request)
    else:
        asking.now_ns = request.expires_ns + 1
        asking.batcher.expire()
    assert eventually(asking.behind.enter), "it needs nothing of what the other instance has"
    asking.batcher.close()
    assert asking.ended(0)


def test_instances_of_two_models_take_turns_and_batches_grow_meanwhile(tmp_path: Path) -> None:
    limited = """max_batch_size: 8 dynamic_batching {} instance_group { count: 1 kind: KIND_CPU
        rate_limiter { resources { name: "one" count: 1 } } }"""
    for name in ("a", "b"):
        write_model(tmp_path, name, config=limited, gate="limited")
    write_model(tmp_path, "free", config="max_batch_size: 8", gate="limited")

    def infer(model: str) -> None:
        with triton.InferenceServerClient(server.address) as client:
            tensor = triton.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
            assert client.infer(model, [tensor]).as_numpy("y").tolist() == [[3, 3, 3, 3]]

    with serving(tmp_path, rate_limit={}) as server, ThreadPoolExecutor(8) as clients:
        def pending(model: str) -> int:
            return server.server.repository.find(model).pending
        with GATES["limited"].closed():
            requested = [clients.submit(infer, "a")]
            assert GATES["limited"].holds(1)
            requested += [clients.submit(infer, "b") for _ in range(5)]
            assert eventually(lambda: pending("b") == 5)
            requested.append(clients.submit(infer, "free"))
            assert GATES["limited"].holds(2) and pending("b") == 5, "b waits for a, and what is not limited for nobody"
        for each in requested:
            each.result()
        statistics = server.server.repository.find("b").statistics
        assert eventually(lambda: statistics.snapshot().inference_count == 5)
        assert statistics.snapshot().execution_count == 1
    write_model(tmp_path, "a", config=limited.replace("count: 1 }", "count: 2 }"))
    with serving(tmp_path, rate_limit={"one": 1}) as server:
        assert "it needs 2 of 'one'" in server.server.failures()["a version 1"]
