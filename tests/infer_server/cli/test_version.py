"""Every command reports its version with --version."""
from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name

import pytest

with (Path(__file__).parents[3] / "pyproject.toml").open("rb") as file:
    COMMANDS = tomllib.load(file)["project"]["scripts"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_tells_its_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        resolve_name(COMMANDS[command])(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{command} {metadata.version('infer-server')}\n")
