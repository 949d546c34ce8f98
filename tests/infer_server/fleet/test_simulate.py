"""The simulated fleet against queueing theory and against the server's own batching policy; balancers; seeds."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from infer_server.batching.batch_times import AdaptiveBatchLimit
from infer_server.engines.ir.graph import Array
from infer_server.fleet.service import ServiceTimes, lognormal, measured, stated
from infer_server.fleet.simulate import BALANCERS, Fleet, poisson, simulate

EXPONENTIAL = tuple(-np.log(1 - (np.arange(2000) + 0.5) / 2000))
TENTH = 0.1     # seconds of a batch, whatever its size


def latencies(fleet: Fleet, load: float, requests: int = 20_000, seed: int = 1) -> Array:
    return simulate(fleet, poisson(load * fleet.capacity, requests, seed), seed)


def test_one_instance_is_a_queue_with_poisson_arrivals() -> None:
    """Mean times follow Pollaczek and Khinchine: service + load * service * (1 + variance) / (2 (1 - load))."""
    for spread, variance in ((EXPONENTIAL, 1.0), ((1.0, 1.0), 0.0)):
        fleet = Fleet(1, 1, ServiceTimes((1,), (TENTH,), spread, ""), 1)
        means = [latencies(fleet, 0.6, seed=seed).mean() for seed in range(6)]
        assert np.mean(means) == pytest.approx(TENTH * (1 + 0.6 * (1 + variance) / 0.8), rel=0.06)


def test_without_company_a_request_takes_its_own_time() -> None:
    times = stated(10, 5, 8, deviation=0.0)
    fleet = Fleet(2, 2, times, 8, request_seconds=0.001, hop_seconds=0.002)
    actual = simulate(fleet, np.arange(100) * 1.0)
    np.testing.assert_allclose(actual, 0.018, rtol=1e-9)


@pytest.mark.parametrize("item_ms, fixed_ms, most", [(17, 0.0, 8), (10, 90, 8), (2, 3, 12), (5, 0.2, 32), (1, 1, 1)])
def test_batches_stop_where_those_of_the_server_stop(item_ms: float, fixed_ms: float, most: int) -> None:
    times = stated(item_ms, fixed_ms, most)
    limit, now_ns = AdaptiveBatchLimit(most), 0
    for _ in range(40):
        for items in (*(1 << power for power in range((most - 1).bit_length())), most):
            now_ns += int(1e9 * times.of(items))
            limit.add(items, int(1e9 * times.of(items)), now_ns)
    assert times.paying_batch(most) == limit.limit


def test_batches_that_pay_are_made_and_others_are_not() -> None:
    def longest(times: ServiceTimes) -> float:
        fleet = Fleet(1, 4, times, 8)
        return float(simulate(fleet, np.zeros(100)).max())
    assert longest(stated(0.001, 100, 8, 0.0)) == pytest.approx(100 / 8 / 4 * 0.1, rel=0.3)
    assert longest(stated(100, 0, 8, 0.0)) == pytest.approx(25 * 0.1)


def test_the_event_loop_is_a_queue_of_its_own() -> None:
    fleet = Fleet(1, 64, stated(1, 0, 1, 0.0), 1, request_seconds=0.01)
    assert fleet.capacity == pytest.approx(100)
    np.testing.assert_allclose(np.sort(simulate(fleet, np.zeros(50))), np.arange(6, 51) * 0.01 + 0.001)


def test_balancers_come_in_the_order_of_what_they_know() -> None:
    fleet = Fleet(16, 4, stated(20, 0, 1), 1)
    p99 = {name: float(np.percentile(latencies(replace(fleet, balancer=name), 0.8), 99)) for name in BALANCERS}
    assert p99["least-request"] <= p99["two-choices"] < p99["random"] < p99["connection"]
    assert p99["round-robin"] < p99["random"]
    many = latencies(replace(fleet, balancers=100), 0.8)
    assert np.percentile(many, 99) > p99["two-choices"]
    slow = replace(fleet, slow=1 / 16)
    rate = 0.7 * fleet.capacity
    slowed = {name: np.percentile(simulate(replace(slow, balancer=name), poisson(rate, 20_000, 1)), 99)
              for name in ("round-robin", "least-request")}
    assert slowed["round-robin"] > 3 * slowed["least-request"]


def test_equal_seeds_give_equal_results() -> None:
    fleet = Fleet(4, 2, stated(20, 1, 8), 8)
    np.testing.assert_array_equal(latencies(fleet, 0.7), latencies(fleet, 0.7))
    assert not np.array_equal(latencies(fleet, 0.7), latencies(fleet, 0.7, seed=2))


def test_measured_times_keep_their_mean_and_spread() -> None:
    sample = np.random.default_rng(0).gamma(4, 0.01, 4000)
    times = measured({1: sample, 4: 3 * sample}, "")
    drawn = times.draws(np.random.default_rng(1), 50_000) * times.of(1)
    assert drawn.mean() == pytest.approx(sample.mean(), rel=0.02)
    assert np.percentile(drawn, 99) == pytest.approx(np.percentile(sample, 99), rel=0.05)
    assert (times.of(2), times.of(7)) == pytest.approx((times.of(1) * 5 / 3, times.of(4) * 5 / 3))
    assert np.mean(lognormal()) == pytest.approx(1, abs=0.01)
