"""Tests of AdaptiveBatchLimit: batches that save no time are not formed, by measured times and in simulated queues."""
from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from infer_server.batching.batch_times import AdaptiveBatchLimit, BatchTimes
from infer_server.batching.policy import BatchChoice, BatchPolicy, Instances, Send, Wait, choose, decide

MS = 1_000_000
SECOND = 1000 * MS


@dataclass(frozen=True)
class Waiting:
    items: int = 1
    enqueued_ns: int = 0
    shape_key: str = "same"
    deadline_ns: int = 0


def ones(count: int) -> list[Waiting]:
    return [Waiting() for _ in range(count)]


def measured(max_batch: int = 8, **ms: float) -> AdaptiveBatchLimit:
    """Return a limit that has three measurements at time 0 for each batch size, e.g. measured(_1=10, _8=50) in ms."""
    paying = AdaptiveBatchLimit(max_batch)
    for items, takes_ms in ms.items():
        for _ in range(3):
            paying.add(int(items[1:]), int(takes_ms * MS), 0)
    return paying


@pytest.mark.parametrize(("paying", "limit"), [
    (measured(), 8),                                    # nothing is known: all that waits, as in Triton
    (measured(_1=2), 8),                                # nothing of larger batches
    (measured(_1=200), 2),                              # ... which might take long
    (measured(_1=200, _2=400), 1),
    (measured(_1=200, _8=1600), 1),
    (measured(_1=200, _3=590), 1),                      # a gain of less than 5 %
    (measured(_1=200, _2=250, _4=350, _8=560), 8),
    (measured(_1=200, _2=250, _4=440, _8=880), 4),      # no further gain beyond 4
    (measured(_1=2, _2=2.5), 8),                        # the largest size measured pays: larger ones may
    (measured(_1=200, _2=250), 4),
    (measured(_8=1600), 8),                             # the only size measured
    (measured(_1=0.02, _8=0.16), 8),                    # handing over a batch costs more than computing it
    (measured(6, _1=200, _6=1200), 1),
    (measured(6, _1=200, _6=600), 6),
    (measured(1, _1=200), 1),
])
def test_the_limit_is_the_smallest_size_near_the_least_time_per_item(paying: AdaptiveBatchLimit, limit: int) -> None:
    assert paying.limit == paying.current_limit(0) == limit


def test_one_slow_execution_limits_nothing() -> None:
    paying = measured(_1=2)
    paying.add(8, 1600 * MS, 0)
    assert paying.limit == 8
    paying = measured(_1=200, _8=400)
    paying.add(8, 5000 * MS, 0)
    assert paying.limit == 8


def test_one_batch_of_an_untested_size_is_executed_at_a_time() -> None:
    paying = measured(_1=200)
    assert paying.current_limit(0) == 2
    paying.record_start(2, 0)
    assert paying.current_limit(1) == paying.current_limit(799 * MS) == 1
    assert paying.current_limit(801 * MS) == 2, "that execution has failed"
    paying.record_start(2, 801 * MS)
    paying.add(2, 250 * MS, 1051 * MS)
    assert paying.current_limit(1051 * MS) == 2
    paying.add(2, 250 * MS, 1300 * MS)
    assert paying.current_limit(1300 * MS) == 4


def test_memory_does_not_grow_with_executions_or_sizes() -> None:
    paying = AdaptiveBatchLimit(1 << 20)
    for items in range(1, 5000):
        paying.add(items, items * MS, items)
    assert sum(map(len, paying._times)) <= 21 * 6 and len(paying._times) == 21


def test_the_policy_takes_no_more_than_pays() -> None:
    policy = BatchPolicy(8)
    assert decide(ones(5), 0, policy, limit=1) == Send(1)
    assert decide(ones(5), 0, policy, limit=4) == Send(4)
    assert decide(ones(5), 0, policy, idle=4, limit=4) == Send(1)
    assert decide(ones(8), 0, policy, idle=3, limit=2) == Send(2), "the share is one of all that wait"
    assert decide([Waiting(2), Waiting(2), Waiting(2)], 0, policy, limit=4) == Send(2)
    assert decide([Waiting(6), Waiting(1)], 0, policy, limit=4) == Send(1), "a request is never cut"


def test_preferred_sizes_and_delays_mean_what_they_mean_in_triton() -> None:
    preferred = BatchPolicy(8, frozenset({4}))
    assert decide(ones(6), 0, preferred, limit=1) == Send(4)
    assert decide(ones(3), 0, preferred, limit=1) == Send(3)
    delayed = BatchPolicy(8, max_queue_delay_us=100)
    assert decide(ones(8), 0, delayed, limit=1) == Send(8)
    assert decide(ones(3), 0, delayed, limit=1) == Wait(100_000)
    assert decide(ones(3), 100_000, delayed, limit=1) == Send(3)


def test_with_deadlines_no_more_is_taken_than_pays_either() -> None:
    times = BatchTimes()
    times.add(1, 200 * MS, 0)
    times.add(8, 1600 * MS, 0)
    patient = [Waiting(deadline_ns=60 * SECOND) for _ in range(8)]
    assert choose(patient, 0, BatchPolicy(8), Instances(limit=1), times) == BatchChoice(patient[:1])
    hasty = [Waiting(deadline_ns=220 * MS), *patient]
    choice = choose(hasty, 0, BatchPolicy(8), Instances(limit=1), times)
    assert isinstance(choice, BatchChoice) and len(choice.batch) == 1
    larger = [Waiting(4, deadline_ns=200 * MS), *patient]       # late, and larger than what pays
    assert isinstance(choose(larger, 0, BatchPolicy(8), Instances(limit=1), times), BatchChoice)


def test_a_neighbouring_size_is_tried_now_and_then() -> None:
    paying = measured(_1=200, _2=400)
    due = 201 * 500 * MS                            # a 500th of the time of one instance
    assert paying.current_limit(due - 500 * MS) == 1
    assert paying.current_limit(due) == 2
    paying.record_start(1, due)
    assert paying.current_limit(due) == 2, "only one was waiting: that was no trial"
    paying.record_start(2, due)
    assert paying.current_limit(due) == paying.current_limit(due + 2 * 200 * 500 * MS) == 1


def test_a_size_that_comes_to_pay_is_found_again() -> None:
    """The model was slow while another process used the CPU; now every batch size takes the same time."""
    paying, now_ns = measured(_1=2, _2=4, _4=8, _8=16), 0
    for _ in range(40_000):
        now_ns += 3 * MS
        items = paying.current_limit(now_ns)
        paying.record_start(items, now_ns)
        paying.add(items, 2 * MS, now_ns)           # now as long for any size
    assert paying.limit == 8


def simulated(max_batch: int, takes_ms: Callable[[int], float], rate: float, instances: int = 16,
              requests: int = 4000) -> tuple[float, float]:
    """Return (99th percentile of latency in ms, items/s) of a simulated queue with the server's policy."""
    rng, policy, paying = random.Random(3), BatchPolicy(max_batch), AdaptiveBatchLimit(max_batch, instances)
    events: list[tuple[int, int, int, int]] = []        # (time, order, items that end or 0: a request comes, started)
    at = 0.0
    for order in range(requests):
        at += rng.expovariate(rate) * SECOND
        events.append((int(at), order, 0, 0))
    queue, idle, latencies, order, now_ns = list[Waiting](), instances, list[float](), requests, 0
    heapq.heapify(events)
    while events:
        now_ns, _, items, since_ns = heapq.heappop(events)
        if items:
            idle += 1
            paying.add(items, now_ns - since_ns, now_ns)
        else:
            queue.append(Waiting(enqueued_ns=now_ns))
        while queue and idle:
            decision = decide(queue, now_ns, policy, idle - 1, paying.current_limit(now_ns))
            assert isinstance(decision, Send)
            batch, queue = queue[:decision.count], queue[decision.count:]
            paying.record_start(len(batch), now_ns)
            idle -= 1
            order += 1
            done_ns = now_ns + int(takes_ms(len(batch)) * MS * rng.uniform(0.97, 1.03))
            latencies += [(done_ns - request.enqueued_ns) / MS for request in batch]
            heapq.heappush(events, (done_ns, order, len(batch), now_ns))
    return sorted(latencies)[len(latencies) * 99 // 100], requests / now_ns * SECOND


def test_batches_that_save_nothing_cost_no_latency() -> None:
    """16 instances at 85 % load need 200 ms an item; taking all waiting requests makes latency 3.7 times as high."""
    alone, _ = simulated(1, lambda items: 200.0 * items, rate=68)
    batched, _ = simulated(8, lambda items: 200.0 * items, rate=68)
    assert batched <= 1.15 * alone


@pytest.mark.parametrize(("fixed_ms", "instances"), [(20, 1), (20, 4), (200, 2), (2, 1)])
def test_models_whose_batches_pay_keep_their_throughput(fixed_ms: int, instances: int) -> None:
    def takes_ms(items: int) -> float:
        return fixed_ms * (0.9 + 0.1 * items)
    best = instances * 8 / takes_ms(8) * 1000
    _, rate = simulated(8, takes_ms, rate=2 * best, instances=instances)
    assert rate >= 0.97 * best
