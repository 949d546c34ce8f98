"""The demo end to end, with the commands that are installed beside this Python."""
from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
COMMANDS = ("build-engine", "run-engine", "infer-server", "load-test")
DATA = SCRIPTS / "demo_data"

pytestmark = pytest.mark.skipif(not all(Path(sys.executable).with_name(name).exists() for name in COMMANDS),
                                reason="the commands are not installed beside this Python; scripts/test installs them")


def copy_demo(folder: Path) -> None:
    """Copy the demo with every eighth calibration image."""
    shutil.copy(SCRIPTS / "demo.py", folder)
    left_out = {path.name for number, path in enumerate(sorted((DATA / "calibration").iterdir())) if number % 8}
    shutil.copytree(DATA, folder / "demo_data", ignore=lambda _, names: left_out.intersection(names))


def run_demo(scripts: Path, results: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(scripts / "demo.py"), "--seconds", "0.3", "--results", str(results)],
                          capture_output=True, text=True)


@pytest.mark.slow
def test_the_demo_does_the_whole_job(tmp_path: Path) -> None:
    copy_demo(tmp_path)
    done = run_demo(tmp_path, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("top-1 on 500 held-out images", "images/s, batch 32", "served images/s, 32 in flight"):
        assert line in done.stdout
    assert (tmp_path / "load-test.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_that_fails_ends_the_demo_and_says_which(tmp_path: Path) -> None:
    copy_demo(tmp_path)
    (tmp_path / "demo_data" / "model.onnx").write_bytes(b"not a model")
    done = run_demo(tmp_path, tmp_path / "results")
    assert done.returncode == 1
    assert done.stderr.startswith("demo failed: build-engine exited with")
    assert "model.onnx" in done.stderr and "Traceback" not in done.stderr
