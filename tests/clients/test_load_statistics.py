from __future__ import annotations

import pytest

from infer_server.clients.load.statistics import difference, read
from infer_server.protos import inference as pb


def entry(requests: int, executions: int, ms: float, batches: dict[int, int]) -> pb.ModelStatistics:
    statistics = pb.ModelStatistics(name="m", inference_count=requests, execution_count=executions)
    for index, phase in enumerate(("queue", "compute_input", "compute_infer", "compute_output"), 1):
        duration = getattr(statistics.inference_stats, phase)
        duration.count, duration.ns = requests, int(requests * ms * index * 1e6)
    for size, count in batches.items():
        statistics.batch_stats.add(batch_size=size).compute_infer.count = count
    return statistics


def test_the_difference_covers_only_what_happened_between_the_readings() -> None:
    before, after = entry(100, 100, 9.0, {1: 100}), entry(160, 115, 9.0, {1: 100, 4: 15})
    after.inference_stats.queue.ns = before.inference_stats.queue.ns + int(60 * 0.5e6)
    split = difference(read([before]), read([after]))
    assert split is not None
    assert split.queue_ms == pytest.approx(0.5)
    assert (split.compute_input_ms, split.compute_infer_ms, split.compute_output_ms) == pytest.approx((18, 27, 36))
    assert (split.executions, split.mean_batch, dict(split.batch_sizes)) == (15, 4.0, {4: 15})


def test_versions_of_a_model_are_added_up() -> None:
    nothing = [entry(0, 0, 0, {}), entry(0, 0, 0, {})]
    split = difference(read(nothing), read([entry(10, 10, 1, {1: 10}), entry(30, 10, 3, {1: 5, 5: 5})]))
    assert split is not None
    assert split.queue_ms == pytest.approx((10 * 1 + 30 * 3) / 40)
    assert split.batch_sizes == {1: 15, 5: 5}


def test_nothing_executed_is_no_split() -> None:
    assert difference(read([entry(5, 5, 1, {1: 5})]), read([entry(5, 5, 1, {1: 5})])) is None
