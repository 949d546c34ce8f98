from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from infer_server.clients.load.measure import OK, LoadWindow, Recorder, is_stable, latency_of, percentile, summarise
from infer_server.clients.load.schedule import Open


@pytest.mark.parametrize("count", (1, 2, 99, 100, 101, 1000))
def test_percentiles_are_latencies_that_occurred_and_enclose_numpys_interpolation(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count)
    for percent in (50, 90, 95, 99):
        actual = percentile(values, percent)
        assert actual in values
        assert (values <= actual).mean() >= percent / 100
        assert (values < actual).mean() < percent / 100
        below, above = (np.percentile(values, percent, method=method) for method in ("lower", "higher"))
        assert below <= actual <= above


def test_nothing_measured_is_nan_and_not_zero() -> None:
    assert all(math.isnan(value) for value in vars(latency_of(np.zeros(0))).values())


def test_latency_counts_from_when_a_request_was_due() -> None:
    recorder = Recorder()
    recorder.add(due=1.0, sent=1.5, ended=1.6, status=OK)
    summary = summarise(recorder.since(0), 0, 2, batch=1)
    assert summary.latency.mean == pytest.approx(600)
    assert summary.send_delay_ms == pytest.approx(500)


def test_latency_is_of_requests_due_in_the_interval_and_throughput_of_those_that_ended_in_it() -> None:
    recorder = Recorder()
    for due, ended in ((0.5, 1.1), (1.2, 1.3), (1.8, 2.5), (2.1, 2.2)):
        recorder.add(due, due, ended, OK)
    summary = summarise(recorder.since(0), 1, 2, batch=8)
    assert summary.requests == 2
    assert summary.latency.max == pytest.approx(700)
    assert summary.throughput == 2 * 8


def test_failed_requests_are_counted_by_status_and_give_no_latency() -> None:
    recorder = Recorder()
    for status in (OK, "UNAVAILABLE", "INTERNAL", "UNAVAILABLE"):
        recorder.add(0, 0, 0.001 if status == OK else 9e-6, status)
    summary = summarise(recorder.since(0), 0, 1, batch=1)
    assert summary.errors == {"UNAVAILABLE": 2, "INTERNAL": 1}
    assert summary.requests == summary.throughput == 1
    assert summary.latency.mean == pytest.approx(1)


def test_a_poisson_schedule_is_the_same_for_the_same_seed() -> None:
    first, again, other = (list(itertools.islice(Open(100).arrivals(seed), 3000)) for seed in (7, 7, 8))
    assert first == again != other
    assert all(a < b for a, b in itertools.pairwise(first))


def test_gaps_of_a_poisson_schedule_have_the_mean_and_the_deviation_of_an_exponential() -> None:
    gaps = np.diff(list(itertools.islice(Open(200).arrivals(0), 20_000)))
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 200, rel=0.03)


@pytest.mark.parametrize(("windows", "stable"), [
    ([(200, 100.0, 5.0)] * 2, False),
    ([(200, 100.0, 5.0)] * 3, True),
    ([(200, 100.0, 5.0), (200, 109.0, 5.0), (200, 92.0, 5.4)], True),
    ([(200, 100.0, 5.0), (200, 130.0, 5.0), (200, 100.0, 5.0)], False),
    ([(200, 100.0, 5.0), (200, 100.0, 7.0), (200, 100.0, 5.0)], False),
    ([(200, 300.0, 9.0), *[(200, 100.0, 5.0)] * 3], True),
    ([*[(200, 100.0, 5.0)] * 3, (200, 300.0, 9.0)], False),
    ([(99, 100.0, 5.0)] * 3, False),
    ([(0, 0.0, math.nan)] * 3, False),
])
def test_three_windows_in_a_row_must_agree(windows: list[tuple[int, float, float]], stable: bool) -> None:
    assert is_stable([LoadWindow(*window) for window in windows]) is stable


def test_the_throughput_of_an_open_loop_may_scatter_but_its_latency_may_not() -> None:
    assert is_stable([LoadWindow(200, throughput, 5.0) for throughput in (80, 100, 130)], throughput_is_scheduled=True)
    assert not is_stable([LoadWindow(200, 100, latency) for latency in (5, 7, 9)], throughput_is_scheduled=True)
