"""Tests of the moment at which an idle instance is woken, counted in turns of the event loop."""
from __future__ import annotations

import asyncio

import numpy as np
import pytest

from infer_server.batching import event_loop
from infer_server.batching.batcher import Batcher
from infer_server.batching.event_loop import Reads, Waker
from infer_server.batching.policy import BatchPolicy, QueuePolicy
from infer_server.batching.request import Request
from tests.infer_server.awaited_reply import AwaitedReply


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the time limit of the event loop, since this process may be suspended between two turns."""
    monkeypatch.setattr(event_loop, "_LIMIT_NS", 1 << 60)


class CountingBatcher(Batcher):
    """Batcher that records how many requests waited at each wake-up."""

    def __init__(self) -> None:
        super().__init__("m", BatchPolicy(4), QueuePolicy(), lambda requests, error: None)
        self.waited: list[int] = []

    def wake(self) -> None:
        self.waited.append(len(self))
        super().wake()

    def take_all(self) -> bool:
        self._remove(list(self._waiting()))
        return True


def submissions(turns_between: list[int], most: int = 4, executes: bool = False) -> list[int]:
    """Submit a request after each of these numbers of loop turns; return the queue's length at each wake-up.

    executes: the loop itself executes queued requests.
    """

    async def submit_all() -> list[int]:
        loop = asyncio.get_running_loop()
        batcher = CountingBatcher()
        waker = Waker(loop, batcher, max_batch_size=most,
                      execute_short=batcher.take_all if executes else lambda: False)
        for turns in turns_between:
            for _ in range(turns):
                await asyncio.sleep(0)
            batcher.submit(Request({"x": np.zeros(1)}, 1, (), lambda outputs: b"", AwaitedReply(loop)))
            waker.submitted()
        for _ in range(50):
            await asyncio.sleep(0)
        return batcher.waited

    return asyncio.run(submit_all())


def test_one_request_wakes_an_instance_without_any_timer() -> None:
    assert submissions([0]) == [1]


def test_requests_that_are_read_in_successive_turns_wake_an_instance_once() -> None:
    assert submissions([0, 1, 2]) == [3]


def test_a_full_batch_is_not_held_back() -> None:
    assert submissions([0, 0, 0, 0, 3])[0] == 4


def test_requests_far_apart_wake_an_instance_each() -> None:
    assert submissions([0, 30]) == [1, 2], "nobody took the first one in this test"


def test_after_requests_that_came_alone_the_next_one_is_waited_for_less() -> None:
    alone = [0, *[30] * 3]
    assert submissions([30, 4], most=100) == [2]
    assert submissions([*alone, 30, 4], most=100) == [1, 2, 3, 4, 5, 6]
    assert submissions([*alone, 30, 0, 30, 4], most=100) == [1, 2, 3, 4, 6, 8]


def test_after_requests_that_came_together_without_pauses_the_next_ones_are_waited_for_less() -> None:
    pair = [30, 0]
    assert submissions([*pair * 3, 30, 4], most=100) == [2, 4, 6, 8]
    assert submissions([*pair * 9, 30, 4], most=100) == [*range(2, 20, 2), 19, 20]
    assert submissions([*[30, 3] * 9, 30, 4], most=100) == [*range(2, 20, 2), 20]


def test_nobody_is_woken_for_what_the_loop_has_executed_by_itself() -> None:
    assert submissions([0, 30, 0], executes=True) == []


def executions(rounds: list[list[int]]) -> list[tuple[int, bool]]:
    """Read these numbers of requests, those of a round in one turn of the loop, and a dozen turns between rounds.

    Returns the requests of each execution on the loop, and whether it was at the end of a read.
    """

    async def read_all() -> list[tuple[int, bool]]:
        loop, executed, in_read = asyncio.get_running_loop(), list[tuple[int, bool]](), False
        batcher, reads = CountingBatcher(), Reads.of(loop)

        def execute() -> bool:
            executed.append((len(batcher), in_read))
            return batcher.take_all()

        waker = Waker(loop, batcher, max_batch_size=100, execute_short=execute)
        for counts in rounds:
            in_read = True
            for count in counts:
                reads.begin()
                for _ in range(count):
                    batcher.submit(Request({"x": np.zeros(1)}, 1, (), lambda outputs: b"", AwaitedReply(loop)))
                    waker.submitted()
                reads.end()
            in_read = False
            for _ in range(12):
                await asyncio.sleep(0)
        return executed

    return asyncio.run(read_all())


@pytest.mark.parametrize("count", [1, 5])
def test_requests_of_one_read_are_executed_at_its_end_once_all_have_come_so(count: int) -> None:
    executed = executions([[count]] * 40)
    assert [requests for requests, _ in executed] == [count] * 40
    assert not executed[0][1], "other reads may follow"
    assert [at_end for _, at_end in executed[24:]].count(False) == 2, "every eighth wait looks for other reads"


def test_requests_of_several_reads_are_executed_together() -> None:
    assert executions([[1, 1, 1]] * 20) == [(3, False)] * 20


def test_requests_are_soon_executed_together_when_several_reads_begin_to_bring_them() -> None:
    executed = executions([[1]] * 20 + [[1, 1, 1]] * 20)
    assert executed[-12:] == [(3, False)] * 12


def test_no_wait_ends_with_its_read_while_some_requests_come_by_several() -> None:
    assert executions([[5], [1, 1, 1]] * 20) == [(5, False), (3, False)] * 20
