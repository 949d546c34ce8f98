"""MLPerf's scenarios, at small counts, and the search for the highest rate."""
from __future__ import annotations

import asyncio
import importlib.util
import json
import math
from pathlib import Path

import pytest

from clients.load.cli import CANNOT_RUN, FAILED, FINE, main
from clients.load.mlperf.search import PRECISION, highest_rate
from tests.clients.server import Doubler, serving

with_loadgen = pytest.mark.skipif(importlib.util.find_spec("mlperf_loadgen") is None,
                                  reason="mlcommons-loadgen is not installed: the extra \"loadgen\"")


@pytest.mark.parametrize("limit", [0.4, 10.0, 777.0])
def test_the_highest_rate_is_found_from_above_and_from_below(limit: float) -> None:
    asked: list[float] = []

    async def holds(rate: float) -> bool:
        asked.append(rate)
        return rate <= limit

    found = asyncio.run(highest_rate(holds, 10.0))
    assert found <= limit < found * PRECISION and found in asked
    assert len(asked) < 2 * abs(math.log2(limit / 10)) + 10


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


def test_a_scenario_that_cannot_run_says_why(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                             tmp_path: Path) -> None:
    for arguments, said in ((["--scenario", "Server"], "needs --latency"),
                            (["--scenario", "Offline", "--batch", "2"], "not with --scenario"),
                            (["--scenario", "Offline", "--rate", "3"], "not allowed with")):
        with pytest.raises(SystemExit):
            main(["-m", "m", *arguments])
        assert said in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert scenario("localhost:1", "Offline", tmp_path / "r.json") == CANNOT_RUN
    assert "infer-server[loadgen]" in capsys.readouterr().err
