"""The timing cache and the engine cache: a second build decides as the first one did, and does not repeat its work."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from infer_server.engines.backends.llvm.tuning import candidate_times, timing
from tests.infer_server.cli.commands import UNTIMED, Workshop


def test_a_build_from_a_timing_cache_times_nothing_and_is_the_same_file(
        workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ("--timing-cache", workshop.path("times.json"), "--no-cache")
    monkeypatch.setattr(timing, "TIMING_SECONDS", 1e-4)         # any times will do
    first = workshop.built(*cache)
    assert all(step.time_us > 0 for step in first.plan.machine.steps)
    monkeypatch.setattr(candidate_times, "measure", lambda calls: pytest.fail(f"{len(calls)} tactics are timed again"))
    workshop.built(*cache, output="second.plan")
    assert Path(workshop.path("second.plan")).read_bytes() == Path(workshop.path("m.plan")).read_bytes()


def test_the_second_identical_build_is_a_lookup_and_still_exports(workshop: Workshop) -> None:
    options = ("--int8", "--calib", workshop.calibration(), "--calibrator", "minmax", *UNTIMED,
               "--cache-dir", workshop.path("cache"))
    assert workshop.build(*options) == 0
    assert workshop.build(*options, "--export-qdq", workshop.path("qdq.onnx"), output="second.plan") == 0
    assert "taken from the engine cache" in workshop.said
    assert Path(workshop.path("qdq.onnx")).exists()
    assert Path(workshop.path("second.plan")).read_bytes() == Path(workshop.path("m.plan")).read_bytes()


def test_another_option_is_another_engine(workshop: Workshop) -> None:
    cache = ("--cache-dir", workshop.path("cache"), *UNTIMED)
    assert workshop.build(*cache) == 0
    assert workshop.build("--fp16", *cache) == 0
    assert "taken from" not in workshop.said


def test_other_ranges_in_the_calibration_cache_are_another_engine(workshop: Workshop) -> None:
    ranges = workshop.path("ranges.json")
    options = ("--int8", "--calib-cache", ranges, "--cache-dir", workshop.path("cache"), *UNTIMED)
    data = ("--calib", workshop.calibration())
    assert workshop.build(*options, *data, "--calibrator", "minmax") == 0
    assert workshop.build(*options, *data, "--calibrator", "minmax") == 0
    assert "taken from the engine cache" in workshop.said
    assert workshop.build(*options) == 0
    first = Path(workshop.path("m.plan")).read_bytes()
    Path(ranges).unlink()
    assert workshop.build("--int8", "--calib-cache", ranges, *data, "--calibrator", "percentile", *UNTIMED) == 0
    assert workshop.build(*options) == 0
    assert "taken from the engine cache" not in workshop.said
    assert Path(workshop.path("m.plan")).read_bytes() != first


def test_of_two_builders_of_one_engine_one_builds(workshop: Workshop) -> None:
    """The second builder finds the cache entry locked, or already complete."""
    command = [sys.executable, "-m", "infer_server.cli.build_engine", workshop.path("m.onnx"), *UNTIMED,
               "--cache-dir", workshop.path("cache"), "-o"]
    builders = [subprocess.Popen([*command, workshop.path(output)], stderr=subprocess.PIPE, text=True)
                for output in ("a.plan", "b.plan")]
    text = "".join(builder.communicate()[1] for builder in builders)
    assert [builder.returncode for builder in builders] == [0, 0], text
    assert text.count("built in") == text.count("taken from the engine cache") == 1


def test_without_an_option_the_second_build_is_a_lookup_and_still_verifies(workshop: Workshop) -> None:
    assert workshop.build(*UNTIMED) == 0
    assert workshop.build(*UNTIMED, "--verify", "-v", output="second.plan") == 0
    assert re.search(r"second.plan: taken from the engine cache \(.*/infer-server/engines/\w+\.plan\)", workshop.said)
    assert "second.plan: verified" in workshop.said
    assert workshop.build(*UNTIMED, "--no-cache") == 0
    assert "built in" in workshop.said


def test_a_cache_that_is_too_small_keeps_nothing_and_says_so(
        workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    assert workshop.build(*UNTIMED, "--cache-size", "1e-9") == 0
    assert "alone takes more than" in caplog.text
    assert workshop.build(*UNTIMED) == 0
    assert "built in" in workshop.said
