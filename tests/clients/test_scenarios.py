"""Tests of MLPerf's scenarios at small counts, and of the search for the highest rate."""
from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from infer_server.clients.load.cli import CANNOT_RUN, FAILED, FINE, main
from infer_server.clients.load.mlperf.run import Run, ScenarioResult, measure
from infer_server.clients.load.mlperf.search import PRECISION, highest_rate
from infer_server.clients.load.schedule import Scenario
from tests.clients.server import Doubler, serving

with_loadgen = pytest.mark.skipif(importlib.util.find_spec("mlperf_loadgen") is None,
                                  reason="mlcommons-loadgen is not installed: the extra \"loadgen\"")


@pytest.mark.parametrize("limit", [0.4, 10.0, 777.0])
def test_the_highest_rate_is_found_from_above_and_from_below(limit: float) -> None:
    requested: list[float] = []

    async def holds(rate: float) -> bool:
        requested.append(rate)
        return rate <= limit

    actual = asyncio.run(highest_rate(holds, 10.0))
    assert actual <= limit < actual * PRECISION and actual in requested
    assert len(requested) < 2 * abs(math.log2(limit / 10)) + 10


def test_where_no_rate_holds_none_is_found() -> None:
    async def never(rate: float) -> bool:
        return False

    assert asyncio.run(highest_rate(never, 10.0)) == 0


def scenario(url: str, name: str, json_to: Path, *arguments: str) -> int:
    return main(["-m", "doubler", "-u", url, "--scenario", name, "--duration", "0.1", "--queries", "5",
                 "--json", str(json_to), *arguments])


@with_loadgen
def test_every_scenario_sends_its_samples_and_gives_its_metric(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, model = tmp_path / "r.json", Doubler()
    with serving(model) as url:
        for name, more in (("SingleStream", ()), ("MultiStream", ("--samples-per-query", "3")), ("Offline", ()),
                           ("Server", ("--latency", "60000"))):
            if name == "Server":
                model.fail_every = 60           # at the latest then a rate does not hold
            before = len(model.received)
            scenario(url, name, report, *more, "--mlperf-logs", str(tmp_path / name))
            (measured,) = json.loads(report.read_text())["servers"]
            runs = measured["runs"]
            sent = sum(run["samples"] for run in runs)
            assert len(model.received) - before == sent + 4, "one to find out whether it fits, three for a first rate"
            assert sent >= 5 and all(run["p50_ms"] <= run["p90_ms"] <= run["p99_ms"] for run in runs)
            assert (tmp_path / name / "0" / "mlperf_log_summary.txt").exists()
            value = {"SingleStream": runs[-1]["p90_ms"], "MultiStream": runs[-1]["p99_ms"],
                     "Offline": runs[-1]["samples_per_sec"],
                     "Server": max((run["rate"] or 0 for run in runs if run["holds"]), default=0)}[name]
            assert measured["value"] == value
            if name == "MultiStream":
                assert sent % 3 == 0
            assert f"{name} of doubler at {url}" in capsys.readouterr().out


@with_loadgen
def test_samples_that_fail_are_counted_and_two_servers_compared(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Doubler()) as good, serving(Doubler(fail_every=3)) as bad:
        assert scenario(good, "SingleStream", tmp_path / "r.json", "--against", good) == FINE
        assert "B / A: " in capsys.readouterr().out
        assert scenario(good, "Offline", tmp_path / "r.json", "--against", bad) == FAILED
    one, other = json.loads((tmp_path / "r.json").read_text())["servers"]
    assert not one["runs"][-1]["errors"] and set(other["runs"][-1]["errors"]) == {"INTERNAL"}


@with_loadgen
def test_an_error_that_is_no_answer_ends_the_run_and_is_raised() -> None:
    requested: list[float] = []

    async def send(timeout: float) -> None:
        requested.append(timeout)
        raise ValueError("no failure of the server's")

    async def once() -> float:
        return 0.01

    target = SimpleNamespace(url="nowhere", requests=[send], try_once=once)
    with pytest.raises(ValueError, match="no failure of the server's"):
        asyncio.run(measure(Scenario("Offline", 0.0, 50, 1, None), target, 0.05, 1.0, 0))    # type: ignore[arg-type]
    assert len(requested) == 1


@with_loadgen
def test_an_interrupt_says_what_it_waits_for_and_the_next_one_leaves() -> None:
    model = Doubler()
    with serving(model) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "infer_server.clients.load.cli", "-m", "doubler", "-u", url,
             "--scenario", "SingleStream", "--duration", "20"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(model.received) < 10:     # until the generator runs: it is asked four times before
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr and "waiting for the generator" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "") and process.returncode == -signal.SIGINT


def test_rates_that_do_not_hold_may_fail_and_the_run_that_counts_may_not(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rate: float, **errors: int) -> Run:
        return Run(rate, 9, rate, 1.0, 1.0, 1.0, not errors, "", errors)

    monkeypatch.setattr("infer_server.clients.load.cli.require_loadgen", lambda: None)
    with serving(Doubler()) as url:
        for value, runs, status in ((4.0, [run(4.0), run(8.0, UNAVAILABLE=3)], FINE),
                                    (4.0, [run(8.0), run(4.0, UNAVAILABLE=3)], FAILED),
                                    (0.0, [run(8.0, UNAVAILABLE=3)], FAILED)):
            measured = AsyncMock(return_value=ScenarioResult("somewhere", "samples/s", value, runs))
            monkeypatch.setattr("infer_server.clients.load.cli.measure", measured)
            assert scenario(url, "Server", tmp_path / "r.json", "--latency", "9") == status


def test_a_scenario_that_cannot_run_says_why(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                             tmp_path: Path) -> None:
    for arguments, output in ((["--scenario", "Server"], "needs --latency"),
                              (["--scenario", "Offline", "--batch", "2"], "not with --scenario"),
                              (["--scenario", "Offline", "--rate", "3"], "not allowed with")):
        with pytest.raises(SystemExit):
            main(["-m", "m", *arguments])
        assert output in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert scenario("localhost:1", "Offline", tmp_path / "r.json") == CANNOT_RUN
    assert "infer-server[loadgen]" in capsys.readouterr().err
