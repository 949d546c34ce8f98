"""plan-capacity: the fewest servers, sources of times, what is printed, and goals that cannot be held."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx.parser
import pytest

from infer_server import build_engine
from infer_server.fleet import cli
from infer_server.fleet.planning import Goal, Simulation
from infer_server.fleet.service import stated
from infer_server.fleet.simulate import Fleet

QUICK = ("--requests", "4000")
MODEL = """<ir_version: 8, opset_import: ["": 17]> small (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }"""


def answer(capsys: pytest.CaptureFixture[str], *options: object, status: int = 0) -> dict[str, Any]:
    assert cli.main([*map(str, options), *QUICK, "--json"]) == status, capsys.readouterr().err
    actual: dict[str, Any] = json.loads(capsys.readouterr().out)
    return actual


def error(capsys: pytest.CaptureFixture[str], *options: object) -> str:
    assert cli.main([*map(str, options), *QUICK]) == 2
    return capsys.readouterr().err


def test_the_answer_holds_the_goal_and_one_server_less_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--item-ms", 17, "--rate", 900, "--p99", 60, "--cores", 4)
    assert found["holds"] and found["planned"]["p99_ms"] <= 60 < found["one_less"]["p99_ms"]
    assert found["cores"] == 4 * found["servers"] and found["servers"] >= 900 * 0.017 / 4
    assert found["curve"][0]["p99_ms"] < found["curve"][-1]["p99_ms"]
    fewer = answer(capsys, "--item-ms", 17, "--rate", 900, "--p99", 60, "--cores", 4, "--servers", found["servers"] - 1,
                   status=1)
    assert not fewer["holds"] and fewer["planned"] == found["one_less"]


def test_a_tighter_goal_and_worse_balancing_need_more_servers(capsys: pytest.CaptureFixture[str]) -> None:
    goal = ("--item-ms", 17, "--rate", 3000, "--cores", 4)
    loose, tight = (answer(capsys, *goal, "--p99", p99)["servers"] for p99 in (200, 30))
    by_connection = answer(capsys, *goal, "--p99", 200, "--balancer", "connection")["servers"]
    assert loose < tight and loose < by_connection


def test_the_search_ends_at_a_number_below_which_the_goal_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    actual = answer(capsys, "--item-ms", 17, "--rate", 2000, "--p99", 60, "--cores", 4, "--balancer", "connection")
    assert actual["servers"] > 2000 * 0.017 / 4 + 4     # the first guess is far below
    assert actual["planned"]["p99_ms"] <= 60 < actual["one_less"]["p99_ms"]


def test_of_a_large_fleet_a_part_with_its_share_is_simulated() -> None:
    fleet, goal = Fleet(6400, 2, stated(10, 0, 1), 1, balancers=200), Goal(1e5, 0.1)
    part = replace(fleet, servers=64, balancers=2)
    assert Simulation(2000).at(fleet, 1e5, goal).p99 == Simulation(2000).at(part, 1e3, goal).p99


def test_a_large_fleet_is_simulated_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    actual = answer(capsys, "--item-ms", 16.9, "--rate", 1e6, "--p99", 100, "--cores", 64, "--request-ms", 0)
    assert 260 < actual["servers"] < 320
    assert any(line.startswith("64 of the") for line in actual["assumed"])


def test_times_come_from_run_engine_and_from_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for batch, mean in ((1, 10.0), (4, 16.0)):
        latency = {"mean": mean, "min": 0.9 * mean, "p50": mean, "p90": 1.1 * mean, "p95": 1.2 * mean, "p99": 2 * mean}
        (tmp_path / f"{batch}.json").write_text(json.dumps({"batch": batch, "latency_ms": latency}))
    part = {"count": "10", "ns": str(10 * 5_000_000)}
    none = {"count": "10", "ns": "0"}
    (tmp_path / "stats.json").write_text(json.dumps({"model_stats": [{"batch_stats": [
        {"batch_size": "2", "compute_input": none, "compute_infer": part, "compute_output": part}]}]}))
    goal = ("--rate", 100, "--p99", 100, "--cores", 2)
    actual = answer(capsys, "--times", tmp_path / "1.json", tmp_path / "4.json", *goal)
    assert "1: 10 ms, 4: 16 ms" in actual["assumed"][0] and "up to 4 of 4 items" in actual["assumed"][1]
    actual = answer(capsys, "--times", tmp_path / "stats.json", *goal)
    assert "2: 10 ms" in actual["assumed"][0]
    (tmp_path / "other.json").write_text("[]")
    assert "other.json is neither run-engine's --json nor" in error(capsys, "--times", tmp_path / "other.json", *goal)


def test_a_plan_is_measured_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "small.plan"
    build_engine(onnx.parser.parse_model(MODEL), timing=False, max_batch=3).save(plan)
    options = (str(plan), "--rate", "50", "--p99", "1000", "--seconds", "0.01", "--plot", str(tmp_path / "c.png"))
    pytest.importorskip("matplotlib")
    assert cli.main([*options, *QUICK]) == 0
    text = capsys.readouterr().out
    assert text.startswith("1 server of 16 instances (16 cores") and "hold 50 requests/s" in text
    assert f"{plan} measured here on 1 thread; 1: " in text and "* 1 balancer by two-choices" in text
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options, message", [
    (("--item-ms", 50, "--rate", 10, "--p99", 40), "no number of servers holds a p99 of 40 ms"),
    (("--rate", 10, "--p99", 40), "give one source of times"),
    (("x.plan", "--item-ms", 5, "--rate", 10, "--p99", 40), "give one source of times"),
    (("--item-ms", 5, "--rate", 10, "--p99", 40, "--cores", 2, "--threads", 4), "a server has 2 cores"),
    (("gone.plan", "--rate", 10, "--p99", 40), "gone.plan")])
def test_what_cannot_be_planned_is_refused(capsys: pytest.CaptureFixture[str], options: tuple[object, ...],
                                           message: str) -> None:
    assert message in error(capsys, *options)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "many"])
def test_a_rate_must_be_a_number_above_0(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--item-ms", "1", "--p99", "1", f"--rate={text}"])
    assert "--rate" in capsys.readouterr().err
