"""The command for the day a GPU is at hand, on the emulated one: every step of it works, what fails is said."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from engines.backends.cuda import tuner
from engines.backends.cuda.runtime.device import DEVICE


def test_every_step_runs_what_fails_is_said_and_nothing_is_done_twice(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(bench: gpu.Bench) -> None:
        raise ValueError("the reason")

    monkeypatch.setattr(DEVICE, "open_gpu", DEVICE.open_gpu)        # which the command replaces
    monkeypatch.setattr(tuner, "HOPEFUL", 1.0)                      # one tactic of each kernel
    monkeypatch.setattr(gpu, "TUNED_FOR", (1,))
    monkeypatch.setattr(gpu, "STEPS", {"broken": fails, **gpu.STEPS})
    arguments = ["--emulated", "sm_80", "--models", "trial", "--precisions", "int8", "--batches", "1",
                 "--match", "resize, int8", "--steps", ",".join(gpu.STEPS), "--results", str(tmp_path / "found.json")]
    gpu.main(arguments)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [key for key in found if key.startswith("FAILED")] == ["FAILED broken"]
    assert "the reason" in found["FAILED broken"]
    assert found["right: resize, int8"] == "yes, by 1 tactics" and found["network: trial int8"].startswith("yes")
    assert found["speed: trial int8 tuned for 1, batch 1"]["items/s"] > 0
    assert found["speed: trial int8 tuned for 1"]["timed"] and not found["speed: trial int8 by the model"]["timed"]
    assert found["steps: trial int8"]["estimated"] > 0 and "peak: fp16, TOP/s" in found
    for name in ("checked", "_speed"):
        monkeypatch.setattr(gpu, name, None)        # the second run finds all there
    gpu.main(arguments)
    assert json.loads((tmp_path / "found.json").read_text()).keys() == found.keys()
