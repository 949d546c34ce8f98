"""Test of benchmarks.search.targets without NNCF: the scores and times of a plan."""
from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.runtimes.runtimes import LOADERS, ORT
from benchmarks.search.targets import Scorer, compare
from infer_server.calibration.open_data import open_calibration_data
from infer_server.engines import load_engine
from tests.engines.compiler.zoo_engines import compiled
from tests.zoo import TINY, images_for


@pytest.mark.parametrize(("metric", "least"), [("agreement", 0.8), ("cosine", 0.99)])
def test_a_plan_is_scored_against_the_float_model(
        metric: str, least: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan, test = tmp_path / "model.onnx", tmp_path / "m.plan", tmp_path / "test.npz"
    source = TINY["mobilenet_v2"]()
    onnx.save(source, model)
    compiled(source, tmp_path, precision="int8").save(plan)
    np.savez(test, input=images_for(source, 8, seed=1))

    scorer = Scorer(model, open_calibration_data(test, load_engine(plan).inputs), metric)
    assert scorer.score(LOADERS[ORT](model, scorer.feed, "fp32", 1)) == pytest.approx(1.0)
    compare(Namespace(model=model, plan=plan, test=str(test), metric=metric, seconds=0.01), {}, {})
    _, head, _, row = capsys.readouterr().out.splitlines()
    assert f"{metric}, float32 1.0000" in head
    name, score, _, ratio, _ = (cell.strip() for cell in row.split("|")[1:-1])
    assert name == "ours" and least < float(score) <= 1.0 and ratio.startswith("1.00")
