"""Tests that executions which are counted together give the sums of the single ones."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.batching.statistics import BatchExecution, Statistics
from infer_server.observing.closing import FREE, FULL

MS = 1_000_000


def executions(count: int) -> list[tuple[BatchExecution, list[int]]]:
    """Return executions of 1 to 4 items 0.1 ms apart, with the queueing times of their requests."""
    rng, found = np.random.default_rng(0), []
    for i in range(count):
        started_ns = 10**12 + i * MS // 10
        enqueued_ns = sorted((started_ns - rng.integers(0, 20 * MS, i % 4 + 1)).tolist())
        copied_ns, computed_ns, encoded_ns = (started_ns + np.cumsum(rng.integers(1, 10 * MS, 3))).tolist()
        found.append((BatchExecution(i % 4 + 1, enqueued_ns[0], started_ns, copied_ns, computed_ns, encoded_ns),
                      enqueued_ns))
    return found


@pytest.mark.parametrize("count", [1, 3, 500])
def test_counters_are_the_sums_over_all_executions(count: int) -> None:
    statistics, done = Statistics(), executions(count)
    for execution, enqueued_ns in done:
        statistics.executed(execution, enqueued_ns, FULL if execution.items == 4 else FREE)
    counters = statistics.snapshot()
    assert counters.execution_count == count
    assert counters.inference_count == sum(execution.items for execution, _ in done)
    assert counters.queue.ns == sum(execution.started_ns - ns for execution, each in done for ns in each)
    assert counters.success.count == sum(len(each) for _, each in done) == sum(counters.answered)
    assert counters.compute_infer.ns == sum(
        len(each) * (execution.computed_ns - execution.copied_ns) for execution, each in done)
    assert counters.closed[FULL] == sum(execution.items == 4 for execution, _ in done)
    assert {size: batch.compute_input.count for size, batch in counters.batches.items()} == {
        size: sum(execution.items == size for execution, _ in done) for size in range(1, min(count, 4) + 1)}
    assert counters.used_ns == done[-1][0].encoded_ns
    assert statistics.totals().requests == counters.success.count, "nothing is counted twice"
