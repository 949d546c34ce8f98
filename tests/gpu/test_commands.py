"""Tests of the commands on plans for GPUs, on a machine without a GPU and with an emulated one."""
from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from infer_server.cli import build_engine as build_command
from infer_server.cli import inspect_engine, profile, run_engine
from infer_server.engines import build_engine
from infer_server.engines.backends.cuda.runtime.device import DEVICE, CudaDevice
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.plan.file import write_plan
from scripts.testing.gpu.emulated import EmulatedGpu, install
from tests.engines.compiler.small_models import node, small_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small_model([node("Gemm", "x w", "h"), node("Softmax", "h", "y")], {"x": ["N", 24]}, ["y"],
                        {"w": np.ones((24, 40), np.float32)})
    builder = Builder(BuildConfig(max_batch=8, opt_batch=4, target="sm_61"))
    found = tmp_path_factory.mktemp("plans") / "m.plan"
    write_plan(builder.plan(builder.graph(model)), found)
    return found


def test_what_nothing_was_timed_for_is_shown_as_the_model_expects_it(
        path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_engine.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert re.search("tactic +us expected", said)
    whole, = re.findall(r"2 kernels, ([0-9.]+) ms an item by the cost model", said)
    items_ms, = re.findall(r"expected on P40: .* at batch 4 \(([0-9.]+) ms\), by the cost model: nothing was", said)
    assert float(whole) == pytest.approx(float(items_ms) / 4, abs=1e-3) and float(whole) > 0
    assert inspect_engine.main([str(path), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["kernels"]
    assert sum(step["expected_us"] for step in steps) == pytest.approx(1e3 * float(whole), abs=1)


def test_a_plan_without_times_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = Builder(BuildConfig(target="portable", timing=False))
    write_plan(builder.plan(builder.graph(small_model([node("Exp", "x", "y")], {"x": ["N", 8]}, ["y"]))),
               tmp_path / "m.plan")
    assert inspect_engine.main([str(tmp_path / "m.plan")]) == 0
    assert "1 kernels, nothing was timed, " in capsys.readouterr().out


def test_a_profile_is_of_the_gpu_and_by_the_time_on_the_wall(
        path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The calling thread only waits, so its CPU time means nothing."""
    install(monkeypatch, EmulatedGpu("sm_61"))
    monkeypatch.setattr(profile, "thread_seconds", None)
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    for main, arguments in ((run_engine.main, [str(path), "--profile"]),
                            (inspect_engine.main, [str(path), "--profile"])):
        assert main(arguments) == 0
        said = capsys.readouterr().out
        assert said.startswith("P40 (sm_61), as its data sheet has it: G MAC/s in int8 19968")
        assert "each step alone 0." in said


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DEVICE, "open_gpu", CudaDevice().open_gpu)
    monkeypatch.setattr("infer_server.engines.backends.cuda.runtime.library.LIBRARY", "libcuda-that-is-not-here.so")


def test_a_plan_that_is_verified_without_its_gpu_is_said_to_be(
        no_driver: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(small_model([node("Exp", "x", "y")], {"x": ["N", 8]}, ["y"]), tmp_path / "m.onnx")
    assert build_command.main([str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.plan"), "--target", "sm_80",
                               "--no-cache", "--verify"]) == 0
    said = capsys.readouterr().err
    assert "m.plan: verified, as it is compiled for this machine: built for the GPU target 'sm_80', but no" in said


def test_a_program_that_is_built_for_another_machine_is_tried_on_this_one_without_a_word(
        no_driver: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model([node("Relu", "x", "h"), node("NonZero", "h", "i"), node("Cast", "i", "f", to=1),
                         node("Exp", "f", "y")], {"x": [4, 8]}, ["y"])
    onnx.save(model, tmp_path / "m.onnx")
    build = build_engine(tmp_path / "m.onnx", target="sm_80", cache=False)
    assert build.plan.program and {part.machine.target for part in build.plan.within()} == {"sm_80"}
    assert not caplog.text
    x = np.eye(4, 8, dtype=np.float32)
    np.testing.assert_allclose(build.engine().run({"x": x})["y"], np.exp(np.stack(np.nonzero(x)).astype(np.float32)),
                               rtol=1e-6)
    assert "built for the GPU target 'sm_80', but no NVIDIA driver is installed" in caplog.text
