"""Meter of a replica and the autoscaling policy."""
from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs the extra ray")

from infer_server.ray.autoscaling import LOAD, ONGOING, Meter, replicas_for_load


def decided(ongoing: dict[str, float] | None = None, load: dict[str, float] | None = None, by_serve: float = 0.0,
            running: int = 1) -> float:
    metrics: dict[str, Any] = {name: values for name, values in ((ONGOING, ongoing), (LOAD, load)) if values}
    return replicas_for_load(SimpleNamespace(
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 4.0), current_num_replicas=running,
        target_num_replicas=2, total_num_requests=by_serve, aggregated_metrics=metrics))[0]


def test_the_policy_takes_the_larger_of_calls_and_load() -> None:
    assert decided({"a": 10.0, "b": 2.0}, {"a": 0.1, "b": 0.1}) == 3.0
    assert decided({"a": 1.0}, {"a": 1.05}) == pytest.approx(1.5)
    assert decided(by_serve=8.0) == 2.0             # calls through Serve's Python proxy
    assert decided() == 0.0
    assert decided(running=0) == 2


def test_the_meter_counts_calls_in_progress() -> None:
    async def run() -> tuple[dict[str, float], dict[str, float]]:
        meter, waiting = Meter(cores=1), asyncio.Event()

        async def serve(_: Any) -> None:
            await waiting.wait()

        calls = [asyncio.create_task(meter.counted(serve)(None)) for _ in range(3)]        # type: ignore[arg-type]
        await asyncio.sleep(0)
        meter.read()
        await asyncio.sleep(0.05)
        during = meter.read()
        waiting.set()
        await asyncio.gather(*calls)
        meter.read()
        await asyncio.sleep(0.01)
        return during, meter.read()

    during, after = asyncio.run(run())
    assert during[ONGOING] == pytest.approx(3.0) and after[ONGOING] == 0.0


def test_a_loop_that_computes_all_the_time_has_load_one() -> None:
    meter = Meter(cores=4)
    begin = time.thread_time()
    while time.thread_time() - begin < 0.1:
        pass
    assert meter.read()[LOAD] > 0.8                 # the wait for a core counts, so a busy machine changes nothing
    time.sleep(0.2)
    assert meter.read()[LOAD] < 0.5
