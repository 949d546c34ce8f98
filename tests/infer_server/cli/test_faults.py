"""Commands report a user's error and an internal error in one line each, with different exit statuses."""
from __future__ import annotations

from typing import Any

import pytest

from infer_server.cli import inspect_engine
from infer_server.engines.lowering.calls.calls import RULES
from tests.infer_server.cli.commands import UNTIMED, Workshop


def broken(*arguments: Any) -> Any:
    raise IndexError("tuple index out of range\nand more")


@pytest.mark.parametrize(("debug", "shown"), [("", False), ("traceback", True), ("passes,traceback", True)])
def test_a_fault_of_the_compiler_is_one_line_with_the_node_and_a_status_of_its_own(
        workshop: Workshop, monkeypatch: pytest.MonkeyPatch, debug: str, shown: bool) -> None:
    monkeypatch.setitem(RULES, "Conv", broken)
    monkeypatch.setenv("INFER_DEBUG", debug)
    assert workshop.build(*UNTIMED) == 70
    *before, last = workshop.said.splitlines()
    assert last.startswith("build-engine: a fault of the compiler at node '/Pad' (Conv): IndexError: tuple index out")
    assert any("Traceback" in line for line in before) == shown


def test_a_users_error_shows_its_traceback_too_where_asked(
        workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_DEBUG", "traceback")
    assert workshop.build("--int8") == 2
    assert "Traceback" in workshop.said
    assert workshop.said.splitlines()[-1].startswith("build-engine: error: an int8 build needs calibration")


def test_a_fault_outside_the_compiler_is_one_line_of_its_command(
        workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(inspect_engine, "read_plan", broken)
    assert inspect_engine.main([workshop.path("m.onnx")]) == 70
    output = "inspect-engine: a fault of inspect-engine: IndexError: tuple index out of range\n"
    assert capsys.readouterr().err == output
