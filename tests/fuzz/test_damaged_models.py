"""Test of some hundred damaged models; python -m tests.fuzz.models runs thousands."""
from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from infer_server.engines.lowering.calls.calls import RULES
from tests.fuzz import models
from tests.fuzz.models import SEEDS, fuzz, judged, outcome, with_names

COUNT, SEED = 300, 0


def test_a_damaged_model_ends_in_a_named_error_or_in_right_answers(tmp_path: Path) -> None:
    results = list(fuzz(COUNT, SEED, tmp_path))
    wrong = [f"{kind}: {done}: {result}" for kind, done, result in results
             if not result.startswith(("refused: ", "right", "unjudged"))]
    assert not wrong, "\n".join(wrong)
    words = [result.split(":")[0] for _, _, result in results]
    assert words.count("refused") > COUNT / 3, "the damage is too slight"
    assert words.count("right") > COUNT / 8, "the damage is too great"


@pytest.mark.parametrize("name", SEEDS)
def test_a_model_without_damage_is_right(name: str, tmp_path: Path) -> None:
    onnx.save(with_names(SEEDS[name]()), tmp_path / "m.onnx")
    assert outcome(str(tmp_path / "m.onnx"), str(tmp_path / "answers.npz")) == "built"
    assert judged(str(tmp_path / "m.onnx"), str(tmp_path / "answers.npz")) == "right"


def test_the_fuzzer_sees_wrong_answers_and_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, answers = str(tmp_path / "m.onnx"), str(tmp_path / "answers.npz")
    onnx.save(with_names(SEEDS["image"]()), path)
    outcome(path, answers)
    other = with_names(SEEDS["image"]())
    other.graph.node[3].op_type = "AveragePool"
    onnx.save(other, path)
    assert judged(path, answers).startswith("WRONG: 'y' is")
    monkeypatch.setitem(models.BUILDERS, "", models.Builder(models.BuildConfig(timing=False)))
    monkeypatch.setitem(RULES, "Conv", lambda ctx, node: 1 // 0)
    assert outcome(path, answers).startswith("FAULT: a fault of the compiler at node 'Conv0' (Conv)")
