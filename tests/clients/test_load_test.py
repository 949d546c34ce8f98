"""Tests of the command load-test against a real server."""
from __future__ import annotations

import asyncio
import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from infer_server.clients.codec import infer_request
from infer_server.clients.load.cli import CANNOT_RUN, FAILED, FINE, INTERRUPTED, main
from infer_server.clients.load.report import CSV_COLUMNS
from tests.clients.server import TIMEOUT_SECS, Doubler, serving

FAST = ["--duration", "0.3", "--warmup", "0.05"]


def load_test(url: str, *arguments: str, json_to: Path | None = None) -> int:
    written = ["--json", str(json_to)] if json_to else []
    return main(["-m", "doubler", "-u", url, *FAST, *arguments, *written])


def levels_of(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())["levels"]


def test_a_closed_loop_reports_every_level_on_screen_and_in_all_files(tmp_path: Path, capsys) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "csv", "plot")}
    model = Doubler(delay_s=0.005)
    with serving(model) as url:
        status = load_test(url, "--concurrency", "1,3", "--batch", "2",
                           *(part for kind, path in files.items() for part in (f"--{kind}", str(path))))
    assert status == FINE
    shown = capsys.readouterr().out
    assert "concurrency 1" in shown and "concurrency 3" in shown

    report = json.loads(files["json"].read_text())
    assert (report["model"], report["url"], report["batch"], report["duration_s"]) == ("doubler", url, 2, 0.3)
    one, three = report["levels"]
    assert [(level["mode"], level["concurrency"], level["rate"]) for level in (one, three)] == [
        ("closed", 1, None), ("closed", 3, None)]
    for level in (one, three):
        latency = level["latency_ms"]
        assert 5 <= latency["p50"] <= latency["p90"] <= latency["p95"] <= latency["p99"] <= latency["max"]
        assert level["errors"] == {}
        assert 0 < level["client_busy"] < 1 and level["client_cpu_us"] == pytest.approx(
            level["client_busy"] * level["measured_s"] * 1e6 / level["requests"])
        ended = round(level["throughput"] * level["measured_s"] / 2)
        assert abs(ended - level["requests"]) <= level["concurrency"], "of each user one may end behind the interval"
        assert level["server"]["mean_batch"] == 2
        assert set(level["server"]["batch_sizes"]) == {"2"}
        assert level["server"]["compute_infer_ms"] >= 5
    assert model.most_at_once == 3
    assert 0 < one["server"]["executions"] + three["server"]["executions"] < model.batches.total()

    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [row["concurrency"] for row in rows] == ["1", "3"]
    assert float(rows[1]["latency_ms.p99"]) == three["latency_ms"]["p99"]
    assert rows[0]["server.batch_sizes"].startswith("2:")

    with Image.open(files["plot"]) as picture:
        assert picture.format == "PNG"
        colored = picture.convert("RGB")
    assert len(colored.getcolors(1 << 24)) > 20
    assert 0.01 < (np.asarray(colored) != 255).any(axis=2).mean() < 0.5, "the plot has something on it"


def test_a_stall_is_counted_for_every_request_that_it_would_have_met(tmp_path: Path) -> None:
    """A stall of 0.4 s in 1 s delays 40 % of the requests, half of them by over 0.2 s."""
    with serving(Doubler(delay_s=0.0, stall_at=5, stall_s=0.4, stalls_when_measured=True)) as url:
        status = main(["-m", "doubler", "-u", url, "--rate", "40", "--duration", "1", "--warmup", "0.2",
                       "--json", str(tmp_path / "r.json")])
    level, = levels_of(tmp_path / "r.json")
    assert status == FINE
    assert (level["mode"], level["rate"], level["stopped_by"]) == ("open", 40, "duration")
    assert level["latency_ms"]["p90"] >= 200
    assert level["latency_ms"]["max"] >= 350


def test_the_test_servers_stall_is_met_by_requests_that_come_together() -> None:
    model, x = Doubler(delay_s=0.0, stall_at=1), np.ones((1, 4), np.float32)

    async def together() -> None:
        await asyncio.gather(*(model.ModelInfer(infer_request("doubler", {"x": x}), None) for _ in range(2)))

    asyncio.run(together())
    assert model.stall_ends


def test_an_open_loop_sends_at_its_rate_whatever_the_server_does(tmp_path: Path) -> None:
    with serving(Doubler(delay_s=0.25)) as url:
        assert load_test(url, "--rate", "20,40", json_to=tmp_path / "r.json") == FINE
    one_at_a_time = 1 / 0.25
    for level in levels_of(tmp_path / "r.json"):
        assert 2 * one_at_a_time < level["requests"] / level["measured_s"] < 2 * level["rate"]


def test_the_sent_data_are_the_files(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.savez(tmp_path / "x.npz", x=rows)
    model = Doubler()
    with serving(model) as url:
        assert load_test(url, "--input-data", str(tmp_path / "x.npz")) == FINE
    sent = {request.raw_input_contents[0] for request in model.received}
    assert sent == {row.tobytes() for row in rows}


def test_failed_requests_are_counted_and_fail_the_test_unless_allowed(tmp_path: Path, capsys) -> None:
    with serving(Doubler(fail_every=3)) as url:
        assert load_test(url, json_to=tmp_path / "r.json") == FAILED
        assert load_test(url, "--allow-errors") == FINE
    level, = levels_of(tmp_path / "r.json")
    assert set(level["errors"]) == {"INTERNAL"}
    assert level["errors"]["INTERNAL"] == pytest.approx(level["requests"] / 2, abs=3)
    assert "ended with INTERNAL: told to fail" in capsys.readouterr().out


def test_outputs_are_compared_if_that_is_asked_for(tmp_path: Path, capsys) -> None:
    with serving(Doubler(wrong_every=3)) as url:
        assert load_test(url, "--check", json_to=tmp_path / "r.json") == FAILED
    level, = levels_of(tmp_path / "r.json")
    assert level["errors"] == {"DATA_LOSS": pytest.approx(level["requests"] / 2, abs=3)}
    assert "output 'y' differs from that of the first answer: 1 of 4 elements" in capsys.readouterr().out
    for model, arguments in ((Doubler(), ["--check"]), (Doubler(wrong_every=3), [])):
        with serving(model) as url:
            assert load_test(url, *arguments) == FINE
    with pytest.raises(SystemExit):
        load_test("http://localhost:8000", "--check")
    assert "argument --check: outputs are read over gRPC only" in capsys.readouterr().err


def test_requests_that_take_too_long_fail_by_their_deadline(tmp_path: Path) -> None:
    with serving(Doubler(stall_at=2, stall_s=600)) as url:        # the first is the trial before the load
        assert load_test(url, "--timeout", "0.1", "--allow-errors", json_to=tmp_path / "r.json") == FAILED
    level, = levels_of(tmp_path / "r.json")
    assert set(level["errors"]) == {"DEADLINE_EXCEEDED"}
    assert level["latency_ms"]["p50"] is None


def test_a_server_without_statistics_is_measured_from_outside(tmp_path: Path, capsys) -> None:
    with serving(Doubler(keeps_statistics=False)) as url:
        assert load_test(url, json_to=tmp_path / "r.json") == FINE
    assert levels_of(tmp_path / "r.json")[0]["server"] is None
    assert "no statistics from the server" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["-m", "doubler", "-u", "127.0.0.1:1"], "127.0.0.1:1"),
    (["-m", "tripler", "-u", "{url}"], "unknown model 'tripler'"),
    (["-m", "doubler", "-u", "{url}", "--shape", "z:3"], "no input 'z'"),
    (["-m", "doubler", "-u", "{url}", "--input-data", "/nowhere.npz"], "/nowhere.npz: No such file or directory"),
])
def test_what_cannot_run_says_why(arguments: list[str], message: str, capsys) -> None:
    with serving(Doubler()) as url:
        assert main([part.format(url=url) for part in arguments]) == CANNOT_RUN
    captured = capsys.readouterr()
    assert captured.err.startswith("load-test: ") and message in captured.err
    assert not captured.out


def test_a_model_that_refuses_the_input_stops_the_test_before_it_begins(capsys) -> None:
    with serving(Doubler(shape=(-1, 3))) as url:
        assert load_test(url) == CANNOT_RUN
    assert "not [1, 3]" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [
    ["--concurrency", "0"], ["--concurrency", "1,x"], ["--rate", "0"], ["--rate", "5", "--concurrency", "1"],
    ["--duration", "0"], ["--duration", "nan"], ["--shape", "3x4"], ["--json", "/nowhere/at/all.json"],
])
def test_a_command_line_that_makes_no_sense_is_refused(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["-m", "doubler", *arguments])
    assert refused.value.code == CANNOT_RUN
    assert arguments[0] in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_the_test(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["-m", "doubler", "-u", "127.0.0.1:1", "--plot", "x.png"]) == CANNOT_RUN
    assert "infer-server[plot]" in capsys.readouterr().err


def test_an_interrupted_test_ends_at_once_and_reports_nothing(tmp_path: Path) -> None:
    model = Doubler()
    with serving(model) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "infer_server.clients.load.cli", "-m", "doubler", "-u", url, "--rate", "50",
             "--duration", "60", "--json", str(tmp_path / "r.json")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(model.received) < 10:     # until the load runs
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == INTERRUPTED
    assert (output, errors) == ("", "load-test: interrupted; nothing is reported\n")
    assert not (tmp_path / "r.json").exists()
