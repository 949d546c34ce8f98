"""Tests of build-engine --verify: the reference it compares with, and the exit status."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infer_server.engines.plan.file import write_plan
from tests.infer_server.cli.commands import UNTIMED, Workshop


@pytest.mark.parametrize("data", [True, False], ids=["calibration data", "generated inputs"])
def test_build_engine_verifies_what_it_wrote(workshop: Workshop, data: bool) -> None:
    calibration = ("--calib", workshop.calibration()) if data else ()
    assert workshop.build("--verify", *calibration, *UNTIMED) == 0, workshop.said
    assert "m.plan: verified" in workshop.said and "passed" in workshop.said


def test_an_int8_plan_is_compared_with_the_float_model_where_there_is_data_else_with_its_own_graph(
        workshop: Workshop) -> None:
    cache = ("--int8", "--calib-cache", workshop.path("ranges"), *UNTIMED)
    assert workshop.build("--verify", "--calib", workshop.calibration(), "--calibrator", "minmax", *cache) == 0
    assert "beside ONNX Runtime" in workshop.said
    assert workshop.build("--verify", *cache) == 0
    assert "reference of its quantised graph" in workshop.said


def test_a_build_that_is_not_verified_exits_with_1_and_says_what_to_do(
        workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    right = write_plan

    def damaged(plan: Any, path: str) -> None:
        right(replace(plan.with_machine(constants=bytes(len(plan.machine.constants))), fingerprint=""), path)

    monkeypatch.setattr("infer_server.engines.compiler.build.write_plan", damaged)
    assert workshop.build("--verify", "--quiet", *UNTIMED) == 1
    for words in ("NOT verified", "output 'output'", "a fault of the compiler"):
        assert words in workshop.said


def test_calibration_data_for_a_float_build_needs_verify(workshop: Workshop) -> None:
    assert workshop.build("--calib", workshop.calibration(), *UNTIMED) == 2
    assert "--verify" in workshop.said
