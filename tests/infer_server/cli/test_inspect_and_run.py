"""Tests of inspect-engine and run-engine: their JSON output and exit statuses."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from infer_server.cli import inspect_engine, relower_plan, run_engine
from infer_server.engines import load_engine
from infer_server.engines.backends.llvm.tuning import peaks
from tests.infer_server.cli.commands import MODEL, UNTIMED, Workshop


@pytest.fixture(autouse=True)
def short_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine's peaks in one round; tests/engines/backends/llvm/test_peaks.py measures them as users do."""
    monkeypatch.setattr(peaks, "ROUNDS", 1)
    monkeypatch.setattr(peaks, "MOST_BYTES", 1 << 24)


@pytest.fixture
def plan(workshop: Workshop) -> str:
    assert workshop.build("--threads", "2", *UNTIMED) == 0
    return workshop.path("m.plan")


def run(workshop: Workshop, *arguments: str) -> dict[str, Any]:
    """Return the JSON output of run-engine --json."""
    assert run_engine.main([*arguments, "--seconds", "0.01", "--json"]) == 0
    result: dict[str, Any] = json.loads(workshop.capture.readouterr().out)
    return result


def test_inspect_describes_the_plan_as_json(workshop: Workshop, plan: str) -> None:
    assert inspect_engine.main([plan, "--json"]) == 0
    described = json.loads(workshop.capture.readouterr().out)
    assert {"name", "target", "cpu", "precision", "max_batch", "inputs", "outputs", "kernels", "constants_bytes",
            "code_bytes", "buffer_bytes", "metadata"} <= set(described)
    assert all({"name", "fuses", "precision", "tactic", "time_us", "macs", "bytes"} <= set(kernel)
               for kernel in described["kernels"])
    assert described["inputs"][0]["name"] == "input" and described["max_batch"] == 4
    fused = [node for kernel in described["kernels"] for node in kernel["fuses"]]
    assert {node.name for node in workshop.model.graph.node if node.op_type == "Conv"} <= set(fused)


@pytest.mark.parametrize("command", [[inspect_engine.main], [inspect_engine.main, "--json"],
                                     [inspect_engine.main, "--profile"], [run_engine.main],
                                     [relower_plan.main, "-o", "other.plan"]],
                         ids=["inspected", "inspected as JSON", "profiled", "run", "relowered"])
def test_a_damaged_plan_ends_a_command_with_one_line(workshop: Workshop, plan: str, command: list[Any]) -> None:
    data = bytearray(Path(plan).read_bytes())
    data[len(data) // 2] ^= 1
    Path(plan).write_bytes(data)
    assert command[0]([plan, *command[1:]]) == 2
    printed = workshop.capture.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert re.search(rf"error: {plan}: section '\S+' .* has a wrong checksum; build the plan again", printed.err)


def test_inspect_prints_a_line_a_kernel(workshop: Workshop, plan: str) -> None:
    assert inspect_engine.main([plan]) == 0
    printed = workshop.capture.readouterr().out
    assert "contraction" in printed and "depthwise" in printed


def test_a_plan_for_another_cpu_is_inspected_with_its_target_and_tiles(workshop: Workshop) -> None:
    assert workshop.build("--fp16", "--target", "avx512_amx_fp16", *UNTIMED) == 0
    assert "sums are in float32" not in workshop.said       # the note for targets that only store halves
    assert inspect_engine.main([workshop.path("m.plan"), "--json"]) == 0
    described = json.loads(workshop.capture.readouterr().out)
    assert described["target"] == "avx512_amx_fp16" and "amx_fp16" in described["cpu"]["features"]
    tiles = [kernel for kernel in described["kernels"] if " amx" in kernel["tactic"]]
    assert tiles and {kernel["precision"] for kernel in tiles} == {"fp16"}
    assert workshop.build("--fp16", "--target", "avx512_amx", *UNTIMED) == 0
    assert "avx512_amx has no fp16 arithmetic" in workshop.said


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["fails at the end", "fails at the first line"])
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_reader_that_has_read_enough_is_no_error(plan: str, option: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "infer_server", "inspect-engine", plan, *option]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONUNBUFFERED": unbuffered}) as inspecting:
        assert inspecting.stdout and inspecting.stderr
        inspecting.stdout.close()
        assert inspecting.stderr.read() == ""
    assert inspecting.returncode == 0


def test_run_measures_throughput_and_latency(workshop: Workshop, plan: str) -> None:
    result = run(workshop, plan, "--batch", "4", "--threads", "1")
    assert result["throughput"] > 0 and result["batch"] == 4 and result["threads"] == 1
    latency = result["latency_ms"]
    assert 0 < latency["min"] <= latency["p50"] <= latency["p90"] <= latency["p95"] <= latency["p99"]


def test_run_takes_the_threads_that_the_plan_was_built_for(workshop: Workshop, plan: str) -> None:
    assert run(workshop, plan)["threads"] == 2


def test_run_pins_its_threads(workshop: Workshop, plan: str) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        assert run(workshop, plan, "--threads", "1", "--pin")["threads"] == 1
        assert os.sched_getaffinity(0) == {min(allowed)}
        assert run_engine.main([plan, "--threads", "2", "--pin"]) != 0
        assert "2 threads, but this process may use 1 CPUs" in workshop.capture.readouterr().err
    finally:
        os.sched_setaffinity(0, allowed)


def test_run_profiles_every_kernel(workshop: Workshop, plan: str) -> None:
    assert run_engine.main([plan, "--threads", "1", "--profile"]) == 0
    printed = workshop.capture.readouterr().out
    assert inspect_engine.main([plan, "--json"]) == 0
    for kernel in json.loads(workshop.capture.readouterr().out)["kernels"]:
        assert kernel["name"] in printed


def profiled(workshop: Workshop, command: Callable[[list[str]], int], *arguments: str) -> dict[str, Any]:
    """Return the JSON output of run-engine --profile --json."""
    assert command([*arguments, "--profile", "--json"]) == 0
    result: dict[str, Any] = json.loads(workshop.capture.readouterr().out)
    return result


@pytest.mark.parametrize("command", [inspect_engine.main, run_engine.main])
def test_a_profile_has_every_kernel_its_bound_and_the_peaks(command: Callable[[list[str]], int], workshop: Workshop,
                                                            plan: str) -> None:
    actual = profiled(workshop, command, plan, "--batch", "2")
    kernels = actual["kernels"]
    assert [kernel["name"] for kernel in kernels] == [step.name for step in load_engine(plan).plan.machine.steps]
    assert actual["batch"] == 2 and actual["seconds"] == pytest.approx(sum(kernel["seconds"] for kernel in kernels))
    assert all(kernel["bound_seconds"] > 0 and kernel["bound_by"] for kernel in kernels)
    assert {"int8", "fp32"} <= set(actual["peaks"]["macs_per_second"]) and "L1" in actual["peaks"]["bytes_per_second"]


def test_a_profile_counts_the_whole_batch_and_its_weights_once(workshop: Workshop, plan: str) -> None:
    one, four = (profiled(workshop, inspect_engine.main, plan, "--batch", batch)["kernels"] for batch in "14")
    for a, b in zip(one, four, strict=True):
        assert b["macs"] == 4 * a["macs"] and b["activation_bytes"] == 4 * a["activation_bytes"]
        assert b["constant_bytes"] == a["constant_bytes"]


def test_inspect_profiles_with_the_most_to_gain_on_top(workshop: Workshop, plan: str) -> None:
    assert inspect_engine.main([plan, "--profile"]) == 0
    printed = workshop.capture.readouterr().out.splitlines()
    assert "measured now" in printed[0]
    begin = next(i for i, line in enumerate(printed) if line.startswith("---")) + 1
    column = printed[begin - 2].index("us over") + len("us over")       # numbers end where their heading does
    over = [float(line[:column].split()[-1]) for line in printed[begin:]]
    assert over == sorted(over, reverse=True) and len(over) == len(load_engine(plan).plan.machine.steps)


def test_run_reads_an_array_per_input(workshop: Workshop, plan: str) -> None:
    assert run(workshop, plan, "--batch", "3", "--data", workshop.calibration())["batch"] == 3


@pytest.mark.parametrize(("arrays", "said"), [
    ({"other": np.zeros((4, 3, 32, 32), np.float32)}, "no array for ['input']"),
    ({"input": np.zeros((4, 3, 32, 32))}, "is float64"),
    ({"input": np.zeros((4, 3, 32, 31), np.float32)}, "has shape"),
    ({"input": np.zeros((1, 3, 32, 32), np.float32)}, "has 1 items"),
])
def test_data_that_does_not_fit_is_refused(workshop: Workshop, plan: str, arrays: dict[str, Any], said: str) -> None:
    np.savez(workshop.path("data.npz"), **arrays)
    assert run_engine.main([plan, "--batch", "2", "--data", workshop.path("data.npz")]) == 2
    assert said in workshop.capture.readouterr().err


def test_data_that_is_no_archive_is_refused(workshop: Workshop, plan: str) -> None:
    for name, content in (("text.npz", b"a text"), ("cut.npz", b"PK\3\4")):
        Path(workshop.path(name)).write_bytes(content)
    np.save(workshop.path("one.npy"), np.zeros(1))
    for name in ("text.npz", "cut.npz", "one.npy"):
        assert run_engine.main([plan, "--data", workshop.path(name)]) == 2
        output = workshop.capture.readouterr().err
        assert name in output and "numpy.savez" in output


def test_a_batch_that_the_plan_does_not_take_is_refused(workshop: Workshop, plan: str) -> None:
    assert run_engine.main([plan, "--batch", "5"]) == 2
    assert "--max-batch 5" in workshop.capture.readouterr().err
    onnx.save(MODEL(batch=1), workshop.path("fixed.onnx"))
    assert workshop.build("--no-timing", model="fixed.onnx", output="fixed.plan") == 0
    assert run_engine.main([workshop.path("fixed.plan"), "--batch", "2"]) == 2
    assert "no batch axis" in workshop.capture.readouterr().err


@pytest.mark.parametrize("command", [inspect_engine.main, run_engine.main])
def test_a_plan_that_is_not_there_is_named_without_an_error_number(command, workshop: Workshop) -> None:
    assert command([workshop.path("missing.plan")]) == 2
    assert workshop.capture.readouterr().err.endswith("missing.plan: No such file or directory\n")


@pytest.mark.parametrize("seconds", ["-1", "soon", "nan", "inf"])
def test_a_time_that_is_none_is_a_usage_error(workshop: Workshop, seconds: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run_engine.main(["m.plan", f"--seconds={seconds}"])
    assert ended.value.code == 2
    assert f"'{seconds}' is not a number of seconds" in workshop.capture.readouterr().err


@pytest.mark.parametrize("command", [inspect_engine.main, run_engine.main])
def test_a_file_that_is_no_plan_is_refused(command, workshop: Workshop) -> None:
    assert command([workshop.path("m.onnx")]) == 2
    assert "not an engine plan" in workshop.capture.readouterr().err
