"""Tests of plans that are compiled once for several servers: plans of another target, and ONNX models."""
from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer_server import build_engine, load_engine
from infer_server.backend import load_plan
from infer_server.cli import build_engine as build_command
from infer_server.cli import relower_plan
from infer_server.cli.serve import main
from infer_server.engines.machine.cpu import detect
from tests.infer_server.repository.test_warm_start import write_onnx
from tests.infer_server.serving import serving

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
TARGET = "aarch64"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with a plan for a target that this machine is not."""
    if detect().architecture == TARGET:
        pytest.skip(f"{TARGET} is this machine's")
    folder = tmp_path / "models"
    (folder / "m" / "1").mkdir(parents=True)
    build_engine(write_onnx(tmp_path / "onnx").file, target=TARGET, cache=False).save(folder / "m" / "1" / "model.plan")
    return folder


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list of the commands that servers start."""
    commands: list[list[str]] = []
    popen = subprocess.Popen

    def noted(command: list[str], **given: Any) -> Any:
        commands.append(command)
        return popen(command, **given)

    monkeypatch.setattr(subprocess, "Popen", noted)
    return commands


def test_a_plan_of_another_target_is_compiled_once(
        repository: Path, tmp_path: Path, builds: list[list[str]], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shared, key = str(tmp_path / "shared"), tmp_path / "key"
    key.write_text("a secret of some length")
    for folder, plan_store in (("a", shared), ("a", ""), ("b", shared)):      # b: another machine
        with serving(repository, load_plan, plan_store=plan_store, plan_store_key=key, cache_dir=tmp_path / folder
                     ) as running:
            assert running.server.repository.versions("m") == [1]
        assert len(builds) == 1
    assert caplog.text.count(": stored plan ") == caplog.text.count(": hit: plan ") == 1
    assert not [record for record in caplog.records if record.name.endswith("building") and record.levelno > 20]


def test_the_command_and_python_keep_a_plan_that_is_compiled_again(
        repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = repository / "m" / "1" / "model.plan", tmp_path / "out.plan"
    command = [str(plan), "-o", str(out), "--plan-store", str(tmp_path / "shared"), "--cache-dir"]
    assert relower_plan.main([*command, str(tmp_path / "a")]) == 0
    assert "INFO: plan store" in capsys.readouterr().err
    first = out.read_bytes()
    assert relower_plan.main([*command, str(tmp_path / "b")]) == 0 and out.read_bytes() == first
    assert ": hit: plan " in capsys.readouterr().err
    (entry,) = (tmp_path / "a").glob("*.plan")
    before = entry.stat().st_ino
    engine = load_engine(plan, cache=tmp_path / "a")
    assert engine.run({"x": np.zeros((1, 4), np.float32)})["y"].tolist() == [[1, 1, 1, 1]]
    assert [each.stat().st_ino for each in (tmp_path / "a").glob("*.plan")] == [before]


def test_an_onnx_model_is_built_once_for_two_machines_and_by_either_command(
        tmp_path: Path, builds: list[list[str]], caplog: pytest.LogCaptureFixture,
        capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.INFO)
    write_onnx(tmp_path / "models")
    model, shared = str(tmp_path / "models" / "m" / "1" / "model.onnx"), str(tmp_path / "shared")
    command = [model, "-o", str(tmp_path / "m.plan"), "--cache-dir", str(tmp_path / "a"), "--plan-store", shared]
    assert build_command.main(command) == 0
    assert "stored plan" in capsys.readouterr().err
    with serving(tmp_path / "models", load_plan, plan_store=shared, cache_dir=tmp_path / "b") as running:
        assert running.server.repository.versions("m") == [1]
    assert "INFO     infer_server.repository.building" in caplog.text and ": hit: plan " in caplog.text
    assert len(builds) == 1 and builds[0][-4:-2] == ["--plan-store", shared]


def test_options_that_cannot_be_met_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, reason in ((["--plan-store", "nowhere://x"], "Protocol not known"),
                            (["--plan-store-key", "k"], "signs the plans of --plan-store"),
                            (["--plan-store", "memory://x", "--plan-store-key", str(tmp_path / "none")], "none")):
        assert main(["--model-repository", str(tmp_path), *options]) in (1, 2)
        assert reason in capsys.readouterr().err
    onnx = str(write_onnx(tmp_path).file)
    assert build_command.main([onnx, "-o", str(tmp_path / "m.plan"), "--plan-store", "memory://x", "--no-cache"]) == 2
    assert "do without --no-cache" in capsys.readouterr().err
