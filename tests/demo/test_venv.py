"""scripts/venv.sh: what scripts/demo and scripts/test install themselves with."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Makes environments of nothing but itself, and "installs" any requirements file that is there: what is tested is when
# venv.sh asks for what, not pip.
FAKE_PYTHON = f"""#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip") for last; do :; done; test -f "$last" ;;
    *) exec "{sys.executable}" "$@" ;;
esac
"""
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def bash(command: str, cwd: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-euo", "pipefail", "-c", f"source '{SCRIPTS / 'venv.sh'}'; {command}"], cwd=cwd,
                          env={**os.environ, "PYTHON": python}, capture_output=True, text=True)


def test_a_python_that_is_new_enough_is_found(tmp_path: Path) -> None:
    assert bash("find_python", tmp_path).stdout.strip() == sys.executable


def test_no_python_that_is_new_enough_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = bash("find_python", tmp_path, python=str(old))
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stderr and "PYTHON=" in done.stderr


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return str(python)


def test_an_environment_is_reused_until_a_file_changes(tmp_path: Path, fake_python: str) -> None:
    (tmp_path / "pyproject.toml").write_text("a")
    (tmp_path / "requirements.txt").write_text("")
    make = "make_venv env '-r requirements.txt' pyproject.toml"
    mark = tmp_path / "env" / "mark"

    assert "installing" in bash(make, tmp_path, fake_python).stderr
    mark.touch()
    assert bash(make, tmp_path, fake_python).stderr == ""
    assert mark.exists()

    (tmp_path / "pyproject.toml").write_text("b")
    assert "installing" in bash(make, tmp_path, fake_python).stderr
    assert not mark.exists()


def test_a_failed_installation_is_an_error_and_is_not_taken_for_a_good_one(tmp_path: Path, fake_python: str) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    make = "make_venv env '-r missing.txt' pyproject.toml"
    done = bash(make, tmp_path, fake_python)
    assert done.returncode != 0
    assert "could not install -r missing.txt" in done.stderr
    assert not (tmp_path / "env" / "stamp").exists()


def test_what_is_optional_and_cannot_be_installed_is_gone_without(tmp_path: Path, fake_python: str) -> None:
    (tmp_path / "requirements.txt").write_text("")
    make = "OPTIONAL='-r missing.txt' make_venv env '-r requirements.txt' requirements.txt"
    done = bash(make, tmp_path, fake_python)
    assert done.returncode == 0 and "could not install -r missing.txt: env goes without" in done.stderr
    assert bash(make, tmp_path, fake_python).stderr == "", "it is tried once"
