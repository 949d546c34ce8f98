"""The check of benchmarks.threads passes on a right engine, and fails on a wrong one."""
from __future__ import annotations

from contextlib import nullcontext

import pytest

from benchmarks.threads import check, chunk_counts, ready, speed
from infer_server.engines.runtime.specialisation import Specialisation
from tests.engines.conftest import eager  # noqa: F401  (a fixture)
from tests.engines.tiny import mix_plan

READS = [(0, 0), (1, 0), (2, 1), (3, 3)]
ROWS, COLUMNS = 40, 64


@pytest.mark.usefixtures("eager")
def test_every_answer_under_bursts_is_that_of_one_thread() -> None:
    plan = mix_plan(READS, [2, 4], ROWS, COLUMNS)
    for _ in range(50):                 # on a busy machine helpers may come too late for all of them
        actual = check(Specialisation(plan), Specialisation(plan, threads=3), requests=150, batch=4)
        assert (actual.requests, actual.wrong) == (150, 0)
        if actual.by_helpers:
            break
    assert actual.by_helpers > 0


@pytest.mark.usefixtures("eager")
def test_more_threads_than_cores_are_right_as_well() -> None:
    plan = mix_plan(READS, [2, 4], ROWS, COLUMNS)
    assert check(Specialisation(plan), Specialisation(plan, threads=8), requests=60, batch=4).wrong == 0


@pytest.mark.usefixtures("eager")
def test_an_answer_that_differs_is_counted() -> None:
    other = mix_plan([(0, 0), (1, 1), (2, 1), (3, 3)], [2, 4], ROWS, COLUMNS)
    engine = Specialisation(mix_plan(READS, [2, 4], ROWS, COLUMNS))
    assert check(engine, Specialisation(other, threads=2), requests=5, batch=2, contended=nullcontext).wrong == 5


@pytest.mark.usefixtures("eager")
def test_both_contexts_are_timed_and_chunks_counted() -> None:
    plan = mix_plan(READS, [4], ROWS, COLUMNS)
    one, several = ready(Specialisation(plan)), ready(Specialisation(plan, threads=2))
    before = sum(chunk_counts(several))
    for _ in range(200):                # on a busy machine a helper may come too late for many requests in a row
        actual = speed("nothing else", one, several, seconds=0.02)
        if sum(chunk_counts(several)) > before:
            break
    assert actual.p99_ms >= actual.several_ms
    assert sum(chunk_counts(several)) > before, "no helper ran a chunk, and none was late"
    several.close()
