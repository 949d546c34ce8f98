"""When batches are sent and requests expire: pure decisions, no threads, no sleep."""
from __future__ import annotations

from dataclasses import dataclass

import pytest

from infer_server.policy import BatchPolicy, QueuePolicy, Send, Wait, decide


@dataclass(frozen=True)
class Waiting:
    rows: int = 1
    enqueued_ns: int = 0
    shape_key: str = "same"
    deadline_ns: int = 0


def ones(count: int) -> list[Waiting]:
    return [Waiting() for _ in range(count)]


US = 1000


@pytest.mark.parametrize(("queue", "count"), [
    (ones(1), 1),
    (ones(5), 5),
    (ones(9), 8),                                               # a full batch, and one left
    ([Waiting(3), Waiting(3), Waiting(3)], 2),                  # rows count, requests are never cut
    ([Waiting(), Waiting(shape_key="other"), Waiting()], 1),    # other shapes wait for the next batch
])
def test_without_a_delay_all_that_fits_goes_at_once(queue: list[Waiting], count: int) -> None:
    assert decide(queue, 0, BatchPolicy(max_batch_size=8)) == Send(count)


def test_a_window_opens_when_the_oldest_request_arrives_and_ends_after_the_delay() -> None:
    policy = BatchPolicy(max_batch_size=8, max_queue_delay_us=100)
    queue = [Waiting(enqueued_ns=5 * US), Waiting(enqueued_ns=90 * US)]
    assert decide(queue, 50 * US, policy) == Wait(105 * US)
    assert decide(queue, 105 * US, policy) == Send(2)


def test_a_full_batch_does_not_wait_for_the_window() -> None:
    policy = BatchPolicy(max_batch_size=4, max_queue_delay_us=100)
    assert decide(ones(4), 0, policy) == Send(4)
    assert decide([Waiting(3), Waiting(2)], 0, policy) == Send(1)       # cannot grow: the next one does not fit
    assert decide([Waiting(1), Waiting(1, shape_key="other")], 0, policy) == Send(1)


def test_the_largest_preferred_size_that_is_reached_goes_within_the_window() -> None:
    policy = BatchPolicy(8, frozenset({2, 4}), max_queue_delay_us=100)
    assert decide(ones(1), 0, policy) == Wait(100 * US)
    assert decide(ones(3), 0, policy) == Send(2)
    assert decide(ones(6), 0, policy) == Send(4)
    assert decide(ones(6), 100 * US, policy) == Send(6)                 # the window is over: whatever waits


def test_a_batch_that_would_step_over_every_preferred_size_is_sent_before() -> None:
    policy = BatchPolicy(8, frozenset({4}), max_queue_delay_us=100)
    assert decide([Waiting(3), Waiting(3)], 0, policy) == Send(1)


@pytest.mark.parametrize(("default", "override", "requested", "timeout"), [
    (0, False, 50, 0),          # requests may not ask
    (0, True, 50, 50),
    (100, True, 50, 50),
    (100, True, 500, 100),      # they may only shorten it
    (100, True, 0, 100),
])
def test_a_request_may_shorten_its_timeout_where_that_is_allowed(
        default: int, override: bool, requested: int, timeout: int) -> None:
    policy = QueuePolicy(default_timeout_us=default, allow_timeout_override=override)
    assert policy.timeout_us(requested) == timeout
