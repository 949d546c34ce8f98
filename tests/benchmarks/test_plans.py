"""Test of benchmarks.plans: comparison of two plans of one model."""
from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plans import main
from infer_server.engines import build_engine
from tests.engines.compiler.open_models import picture_net
from tests.engines.compiler.zoo_engines import compiled
from tests.zoo import TINY


def test_plans_of_one_name_are_compared_and_steps_of_other_tactics_listed(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, target in (("before", "portable"), ("after", "")):
        (tmp_path / folder).mkdir()
        compiled(TINY["mobilenet_v2"](), tmp_path, precision="int8", target=target).save(tmp_path / folder / "m.plan")
    compiled(TINY["resnet18"](), tmp_path / "after").save(tmp_path / "after" / "alone.plan")
    main([str(tmp_path / "before"), str(tmp_path / "after"), "--batch", "1,2", "--seconds", "0.1", "--steps"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| m")]
    assert [row.split(" | ")[1] for row in rows] == ["1", "2"]
    assert all(row.endswith("equal |") for row in rows), "integers come out the same on every target"


def test_plans_that_give_other_bytes_are_said_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for precision in ("int8", "fp32"):
        compiled(TINY["resnet18"](), tmp_path, precision=precision).save(tmp_path / f"{precision}.plan")
    main([*(str(tmp_path / f"{name}.plan") for name in ("int8", "fp32")), "--seconds", "0.1"])
    assert capsys.readouterr().out.rstrip().endswith("differ |")


def test_an_open_plan_is_compared_by_its_specialisation_for_the_shapes_of_a_fixed_one(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, shapes in (("open", {}), ("fixed", {"x": ("batch", 3, 20, 12)})):
        build_engine(picture_net(), cache=False, timing=False, shapes=shapes).save(tmp_path / f"{name}.plan")
    main([str(tmp_path / "fixed.plan"), str(tmp_path / "open.plan"), "--seconds", "0.1"])
    assert capsys.readouterr().out.rstrip().endswith("equal |")
