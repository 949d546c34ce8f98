"""Every step of benchmarks.gpu runs on the emulated GPU, and failures are reported."""
from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.measure.findings import Findings
from infer_server.engines.backends.cuda import tuner
from infer_server.engines.backends.cuda.runtime.device import DEVICE


def _tells(to: Connection, name: str, most: int | None) -> None:
    to.send("yes")


def _dies(to: Connection, name: str, most: int | None) -> None:
    os._exit(3)


def _sleeps(to: Connection, name: str, most: int | None) -> None:
    time.sleep(600)


def test_every_step_runs_what_fails_is_said_and_nothing_is_done_twice(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(bench: gpu.Bench) -> None:
        raise ValueError("the reason")

    for name in ("open_gpu", "find"):       # the command replaces these functions
        monkeypatch.setattr(DEVICE, name, getattr(DEVICE, name))
    monkeypatch.setattr(tuner, "HOPEFUL", 1.0)                      # one tactic of each kernel
    monkeypatch.setattr(gpu, "TUNED_FOR", (1,))
    monkeypatch.setattr(gpu, "STEPS", {"broken": fails, **gpu.STEPS})
    arguments = ["--emulated", "sm_80", "--models", "trial", "--checked", "", "--precisions", "int8", "--batches", "1",
                 "--match", "resize, int8", "--steps", ",".join(gpu.STEPS), "--results", str(tmp_path / "found.json")]
    gpu.main(arguments)
    actual = json.loads((tmp_path / "found.json").read_text())
    assert [key for key in actual if key.startswith("FAILED")] == ["FAILED broken"]
    assert "the reason" in actual["FAILED broken"]
    assert actual["right: resize, int8"] == "yes, by 1 tactics" and actual["network: trial int8"].startswith("yes")
    assert actual["speed: trial int8 tuned for 1, batch 1"]["items/s"] > 0
    assert actual["speed: trial int8 tuned for 1"]["timed"] and not actual["speed: trial int8 by the model"]["timed"]
    assert actual["steps: trial int8"]["estimated"] > 0 and "peak: fp16, TOP/s" in actual
    for name in ("checked", "_speed"):
        monkeypatch.setattr(gpu, name, None)        # the second run finds all there
    gpu.main(arguments)
    assert json.loads((tmp_path / "found.json").read_text()).keys() == actual.keys()


class Awaited(threading.Event):
    """Event that tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)


def test_what_has_no_end_is_given_up_and_the_rest_starts_anew_behind_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anew, begun, give_up = Awaited(), [], Findings._give_up

    def give_up_who_waits(*given: Any) -> None:
        assert anew.is_awaited.wait(60)         # give up only after the wait has begun, however late
        give_up(*given)

    def start(program: str, arguments: list[str]) -> None:
        begun.append(arguments)
        anew.set()

    monkeypatch.setattr(os, "execv", start)
    monkeypatch.setattr(Findings, "_give_up", give_up_who_waits)
    results = Findings(tmp_path / "found.json", minutes=5)
    with results.part("endless", seconds=0.01):
        assert anew.wait(60)
    actual = json.loads((tmp_path / "found.json").read_text())
    assert "no end after 0.01 s" in actual["FAILED endless"] and "anew.wait" in actual["FAILED endless"]
    assert begun[0][:-2] == sys.orig_argv and begun[0][-2] == "--minutes" and 3 < float(begun[0][-1]) <= 5
    assert not results.is_due("endless")


@pytest.mark.parametrize(("answer", "said"), [(_tells, "yes"), (_dies, "NO: its process ended with 3"),
                                              (_sleeps, "NO: no end after 2 s")])
def test_a_case_that_costs_its_process_says_how(
        answer: Callable[[Connection, str, int | None], None], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_answer", answer)
    assert gpu._alone(None, 2 if answer is _sleeps else 60, "a case") == said
