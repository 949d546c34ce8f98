"""The long checks of GPU kernels run each part once, in order, and report what is wrong."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from infer_server.engines.errors import ConfigError
from scripts.gpu_checks import Check, Result


def test_a_long_check_goes_on_where_it_was_and_says_what_was_not_right(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done = []

    def part(name: str, target: str) -> Result:
        done.append(f"{name} {target}")
        if name == "refused":
            raise ConfigError("no kernel")
        return {"kernels": 1 // len(name)}

    check = Check("help", ("sm_61", "sm_80"), {"kernels": lambda result: result["kernels"]},
                  lambda result: result.get("kernels") == 1)
    names = ["a", "refused", ""]

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["check", "--results", str(tmp_path / "found.json"), *arguments])
        return check.main(lambda options: {name: lambda target, name=name: part(name, target) for name in names},
                          lambda parser: None)

    assert run("--minutes", "0") == 0 and not done
    assert run("--targets", "sm_80") == 1
    assert run("--table") == 1
    assert done == [f"{name} {target}" for target in ("sm_80", "sm_61") for name in names]
    assert json.loads((tmp_path / "found.json").read_text())["a sm_61"]["kernels"] == 1
    said = capsys.readouterr().out
    assert "| a | `sm_61` | 1 |" in said and "| refused | `sm_80` | no kernel |" in said
    assert "|  | `sm_80` | ZeroDivisionError" in said
    assert "6 done, 0 to do; 4 not right: refused sm_80,  sm_80, refused sm_61,  sm_61" in said
