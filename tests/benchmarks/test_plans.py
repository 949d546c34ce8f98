"""Test of benchmarks.plans: comparison of two plans of one model."""
from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.plans import main
from infer_server.engines import build_engine
from tests.engines.compiler.open_models import picture_net
from tests.engines.compiler.zoo_engines import compiled
from tests.zoo import TINY


@pytest.fixture(scope="module")
def int8_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an INT8 plan for this machine."""
    folder = tmp_path_factory.mktemp("int8")
    compiled(TINY["explicit_pads"](), folder, precision="int8").save(folder / "m.plan")
    return folder / "m.plan"


def test_plans_of_one_name_are_compared_and_steps_of_other_tactics_listed(
        int8_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(TINY["explicit_pads"](), tmp_path, precision="int8", target="portable").save(tmp_path / "m.plan")
    shutil.copy(tmp_path / "m.plan", tmp_path / "alone.plan")
    main([str(tmp_path), str(int8_plan.parent), "--batch", "1,2", "--seconds", "0.1", "--steps"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| m")]
    assert [row.split(" | ")[1] for row in rows] == ["1", "2"]
    assert all(row.endswith("equal |") for row in rows), "integers come out the same on every target"
    assert not [line for line in lines if line.startswith("| alone")]
    assert [line for line in lines if line.startswith(" ") and " us  " in line and " -> " in line.partition(" us  ")[2]]


def test_plans_that_give_other_bytes_are_said_to(
        int8_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(TINY["explicit_pads"](), tmp_path).save(tmp_path / "fp32.plan")
    main([str(int8_plan), str(tmp_path / "fp32.plan"), "--seconds", "0.1"])
    assert capsys.readouterr().out.rstrip().endswith("differ |")


def test_an_open_plan_is_compared_by_its_specialisation_for_the_shapes_of_a_fixed_one(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, shapes in (("open", {}), ("fixed", {"x": ("batch", 3, 20, 12)})):
        build_engine(picture_net(), cache=False, timing=False, shapes=shapes).save(tmp_path / f"{name}.plan")
    main([str(tmp_path / "fixed.plan"), str(tmp_path / "open.plan"), "--seconds", "0.1"])
    assert capsys.readouterr().out.rstrip().endswith("equal |")
