"""Quantiles of latency are near the true ones and drop old values; reasons for closing batches are counted."""
from __future__ import annotations

import math

import numpy as np

from infer_server.observing.closing import FREE, FULL, PREFERRED, WAITED, closing_reason
from infer_server.observing.latencies import Latencies

SECOND = 1_000_000_000


def test_quantiles_are_within_a_sixteenth_of_the_true_ones() -> None:
    times = (np.random.default_rng(0).lognormal(13, 2, 5000)).astype(int)
    latencies = Latencies()
    for ns in times:
        latencies.add([int(ns)], SECOND)
    expected = (0.01, 0.5, 0.9, 0.99, 0.999)
    np.testing.assert_allclose(latencies.quantiles(expected, SECOND), np.quantile(times, expected), rtol=1 / 16)


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    latencies = Latencies()
    latencies.add([1000], 100 * SECOND, [3])
    latencies.add([9], 135 * SECOND)
    assert [round(ns) for ns in latencies.quantiles((0.5, 1.0), 136 * SECOND)] == [1008, 1008]
    assert latencies.quantiles((0.5, 1.0), 170 * SECOND) == [9, 9]
    assert math.isnan(latencies.quantiles((0.5,), 300 * SECOND)[0])


def test_a_batch_closes_for_the_first_reason_that_holds() -> None:
    assert closing_reason(8, 0, 8, (), 0) == FULL
    assert closing_reason(4, 10**9, 8, {4}, 1000) == PREFERRED
    assert closing_reason(3, 2 * 10**6, 8, {4}, 1000) == WAITED
    assert closing_reason(3, 10**5, 8, {4}, 1000) == closing_reason(3, 10**9, 8, {4}, 0) == FREE


def test_durations_that_are_added_together_are_counted_as_single_ones() -> None:
    times = [*range(40), *(np.random.default_rng(0).lognormal(13, 4, 500)).astype(int).tolist(), 1 << 52, (1 << 40) - 1]
    together, single = Latencies(), Latencies()
    together.add(times, SECOND)
    for ns in times:
        single.add([ns], SECOND)
    assert together._recent == single._recent
