"""Tests of benchmarks.search: constants chosen without one of the models."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from benchmarks.search.__main__ import read_runs, table, write_runs
from benchmarks.search.left_out import CONSTANTS, leave_one_out
from benchmarks.search.trials import SearchRun, Trial, record

NAMES = ("entropy", "percentile", "percentile:99.9999", "mse", "minmax")


def run(model: str, unseen: dict[str, float]) -> SearchRun:
    """Return a run whose search measures on its items what is best for it: entropy."""
    trials = [Trial("calibrator", name, {"peak_db": 20.0 - i, "sqnr_db": 20.0, "cosine": 1.0, "top1": None},
                    {"sqnr_db": unseen.get(name, 10.0)}) for i, name in enumerate(NAMES)]
    return SearchRun(model, 0, tuple(trials), {"sqnr_db": 10.0})


def test_a_model_that_is_left_out_does_not_choose() -> None:
    runs = [run("a", {"mse": 18.0}), run("b", {"mse": 17.0}), run("c", {"minmax": 30.0})]
    fixed = [one for one in leave_one_out(runs, CONSTANTS) if one.constant == "calibrator"]
    assert {one.model: one.chosen for one in fixed} == {"a": "minmax", "b": "minmax", "c": "mse"}
    by_model = {one.model: one for one in fixed}
    assert by_model["c"].loss == 20.0 and by_model["a"].loss == 8.0
    assert by_model["b"].own_loss == 7.0                # the search takes entropy
    assert not [one for one in leave_one_out(runs, CONSTANTS) if one.constant == "rounding"]    # no such step


def test_draws_of_a_model_count_as_one() -> None:
    runs = [run("a", {"mse": 18.0}), run("a", {"minmax": 18.0}), run("b", {}), run("c", {"mse": 12.0})]
    fixed = {one.model: one for one in leave_one_out(runs, CONSTANTS) if one.constant == "calibrator"}
    assert fixed["b"].chosen == "mse" and fixed["a"].loss == pytest.approx(4.0)


def test_a_search_is_recorded_with_errors_on_unseen_items(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal(32)
    onnx.save(parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 8] x) => (float[N, 4] y) '
        f"<float[8, 4] w = {{{', '.join(f'{value:.4f}' for value in weights)}}}> {{ y = MatMul(x, w) }}"),
        tmp_path / "m.onnx")
    np.savez(tmp_path / "m.npz", x=np.random.default_rng(1).standard_normal((80, 8)).astype(np.float32))
    runs = [record(tmp_path / "m.onnx", tmp_path / "m.npz", draw, 16) for draw in (0, 1)]
    labels = {trial.label for trial in runs[0].trials if trial.stage == "calibrator"}
    assert labels == set(NAMES) and runs[0].final["sqnr_db"] > 20
    assert runs[0].final != runs[1].final                   # other items
    assert all(trial.unseen for trial in runs[0].trials if trial.stage != "range")
    write_runs(runs, tmp_path / "search.json")
    assert read_runs(tmp_path / "search.json") == runs
    assert "m" not in table(leave_one_out(runs, CONSTANTS)).split()         # one model alone chooses nothing
