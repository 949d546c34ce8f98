"""Two plans of one model beside each other."""
from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plans import main
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
