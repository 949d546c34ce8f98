"""Tests of the decisions when batches are sent and requests expire: pure functions, no threads, no sleep."""
from __future__ import annotations

from dataclasses import dataclass

import pytest

from infer_server.batching.batch_times import BatchTimes
from infer_server.batching.policy import (
    BatchChoice,
    BatchPolicy,
    Instances,
    Priorities,
    QueuePolicy,
    Send,
    Wait,
    choose,
    decide,
    is_hopeless,
    shed,
)
from infer_server.batching.statistics import BatchExecution, Statistics


@dataclass(frozen=True)
class Waiting:
    items: int = 1
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
    ([Waiting(3), Waiting(3), Waiting(3)], 2),                  # items count, requests are never cut
    ([Waiting(), Waiting(shape_key="other"), Waiting()], 1),    # other shapes wait for the next batch
])
def test_without_a_delay_all_that_fits_goes_at_once(queue: list[Waiting], count: int) -> None:
    assert decide(queue, 0, BatchPolicy(max_batch_size=8)) == Send(count)


def test_requests_that_must_not_share_a_batch_go_one_by_one_and_at_once() -> None:
    policy = BatchPolicy(max_batch_size=8, max_queue_delay_us=100, merges=False)
    assert decide([Waiting(3), Waiting(1)], 0, policy) == Send(1)


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


def test_a_request_for_a_level_that_is_not_there_has_the_default_one() -> None:
    levels = Priorities((QueuePolicy(),) * 3, 2)
    assert [levels.level(requested) for requested in (0, 1, 3, 4, 1 << 63)] == [1, 0, 2, 1, 1]


MS = 1_000_000


def times(**ms: int) -> BatchTimes:
    """Return measurements taken now, by batch size, e.g. times(_1=10, _8=50) in ms."""
    measured = BatchTimes()
    for items, takes_ms in ms.items():
        measured.add(int(items[1:]), takes_ms * MS, now_ns=0)
    return measured


def due(*deadlines_ms: int) -> list[Waiting]:
    """Return waiting requests with these deadlines in ms."""
    return [Waiting(deadline_ns=ms * MS) for ms in deadlines_ms]


def chosen(queue: list[Waiting], measured: BatchTimes,
           policy: BatchPolicy | None = None) -> BatchChoice[Waiting] | Wait:
    return choose(queue, 0, policy or BatchPolicy(8), Instances(), measured)


def test_as_long_as_everybody_is_in_time_the_oldest_go_first() -> None:
    queue = due(*range(100, 109))
    assert chosen(queue, times(_1=10, _8=50)) == BatchChoice(queue[:8])


def test_under_overload_nobody_is_executed_who_would_be_late() -> None:
    queue = due(*range(10, 1200, 20))                       # 60 that wait, when a batch of 8 takes 500 ms
    choice = chosen(queue, times(_8=500))
    assert isinstance(choice, BatchChoice)
    assert len(choice.batch) == 8
    assert all(request.deadline_ns >= 500 * 9 / 8 * MS for request in choice.batch)
    assert not {id(request) for request in choice.refused} & {id(request) for request in choice.batch}


def test_those_who_cannot_be_answered_given_what_is_ahead_of_them_are_given_up_at_once() -> None:
    queue = due(*[1200] * 40)
    choice = chosen(queue, times(_8=500))
    assert choice == BatchChoice(queue[:8]), "the front is in time, and nobody looks further"
    kept, lost = shed(queue, 8, 500 * MS, 500 * MS)
    assert (len(kept), len(lost)) == (16, 24)


def test_the_nearest_deadline_is_given_up_and_patient_requests_are_not() -> None:
    patient, hasty = due(*[10_000] * 8), due(600)
    assert shed(patient + hasty, 8, 500 * MS, 500 * MS) == (patient, hasty)
    assert shed(hasty + patient, 8, 500 * MS, 500 * MS) == (hasty + patient, [])


def test_who_has_no_deadline_is_never_given_up() -> None:
    queue = ones(20) + due(600)
    assert shed(queue, 8, 500 * MS, 500 * MS) == (queue[:20], queue[20:])


def test_a_small_batch_goes_where_a_large_one_would_come_too_late() -> None:
    queue = due(*[30] * 8)
    choice = chosen(queue, times(_1=5, _2=10, _4=20, _8=40))
    assert isinstance(choice, BatchChoice) and choice.batch == queue[:4]


def test_requests_that_must_not_share_a_batch_do_not_share_one_because_of_a_deadline_either() -> None:
    queue = due(5, 30, 30)
    choice = chosen(queue, times(_1=10), BatchPolicy(8, merges=False))
    assert isinstance(choice, BatchChoice) and choice.batch == queue[1:2]


def test_requests_that_do_not_share_a_batch_are_judged_each_by_its_own_size() -> None:
    late, small, patient = Waiting(100, deadline_ns=15 * MS), Waiting(deadline_ns=100 * MS), Waiting()
    measured, alone = times(_1=10, _100=1000), BatchPolicy(1, merges=False)
    assert chosen([late, small], measured, alone) == BatchChoice([small], [late])
    assert chosen([late, small, patient], measured, alone) == BatchChoice([small], [late])
    just = Waiting(deadline_ns=11 * MS)
    assert chosen([just, late], measured, alone) == BatchChoice([just], [late])
    assert chosen([just, small], measured, alone) == BatchChoice([small])


def test_who_has_more_items_than_a_batch_is_not_refused_because_of_others() -> None:
    """Such a request is executed alone, in parts (split_requests)."""
    late, large, hasty = Waiting(3, deadline_ns=15 * MS), Waiting(100), Waiting(100, deadline_ns=15 * MS)
    policy, measured = BatchPolicy(4), times(_1=10, _4=40)
    assert chosen([late, large], measured, policy) == BatchChoice([], [late])
    assert chosen([large], measured, policy) == BatchChoice([large])
    assert chosen([hasty, large], measured, policy) == BatchChoice([], [hasty])


def test_who_fits_into_no_batch_of_a_usual_size_in_time_is_tried_by_itself() -> None:
    queue = [Waiting(3, deadline_ns=32 * MS)]
    assert chosen(queue, times(_1=10, _8=80)) == BatchChoice(queue)


def test_who_may_just_make_it_is_tried_when_nobody_is_safe() -> None:
    queue = due(105)
    assert chosen(queue, times(_1=100)) == BatchChoice(queue)
    assert not is_hopeless(queue[0], 0, times(_1=100))


def test_nothing_is_executed_when_all_would_be_late() -> None:
    queue = due(90, 95)
    assert chosen(queue, times(_1=100)) == BatchChoice([], queue)
    assert is_hopeless(queue[0], 0, times(_1=100))


def test_a_window_for_a_fuller_batch_ends_in_time_for_the_nearest_deadline() -> None:
    policy = BatchPolicy(8, max_queue_delay_us=1_000_000)
    assert chosen(due(500, 200), times(_8=80), policy) == Wait((200 - 90) * MS)
    assert chosen(due(500, 90), times(_8=80), policy) == BatchChoice(due(500, 90))


def test_without_measurements_everybody_is_in_time() -> None:
    queue = due(1, 2)
    assert chosen(queue, BatchTimes()) == BatchChoice(queue)


def test_a_batch_is_estimated_from_the_sizes_around_it() -> None:
    measured = times(_1=10, _9=90)
    assert [measured.estimate(items, 0).likely / MS for items in (1, 5, 9, 18)] == [10, 50, 90, 180]


def test_one_slow_batch_moves_no_estimate() -> None:
    measured = BatchTimes()
    for ms in [10] * 15 + [1000]:
        measured.add(1, ms * MS, 0)
    assert measured.estimate(1, 0).likely == 10 * MS
    assert measured.estimate(1, 0).safe == 10 * 9 / 8 * MS


def test_a_larger_batch_that_was_faster_corrects_the_smaller() -> None:
    assert times(_1=100, _8=20).estimate(1, 0).likely == 20 * MS


def test_an_estimate_that_nothing_confirms_refuses_nobody_for_ever() -> None:
    measured, (hasty,) = times(_1=1000), due(20_000 + 500)
    assert is_hopeless(Waiting(deadline_ns=500 * MS), 0, measured)
    assert not is_hopeless(hasty, 20_000 * MS, measured)


def test_requests_of_any_number_of_items_are_not_remembered_each_by_its_own() -> None:
    """With max_batch_size 0 or split_requests, sizes are unbounded; ModelStatistics copies all that it records."""
    measured, counted = BatchTimes(), Statistics()
    for items in range(1, 5001):
        measured.add(items, items * MS, 0)
        counted.executed(BatchExecution(items, 0, 0, 0, 0, 0), [0])
    batches = counted.snapshot().batches
    assert set(batches) == {*range(1, 1025), 2048, 4096, 8192} == set(measured._times)
    assert sum(batch.compute_infer.count for batch in batches.values()) == 5000
    assert [measured.estimate(items, 0).likely for items in (1024, 3000, 5000)] == [1024 * MS, 3000 * MS, 5000 * MS]
