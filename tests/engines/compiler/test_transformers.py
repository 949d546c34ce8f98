"""Engines of transformers give ONNX Runtime's results in all forms of exporters."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.zoo.sequences.transformers import Style, recogniser, sentence_encoder, tokens, vit
from infer_server.calibration.workflow import Calibration
from infer_server.engines.compiler.build import build_engine
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.zoo_engines import MAX_BATCH, engine_of, fallbacks, relative_error
from tests.zoo import images_for, run_onnx

TOLERANCE = 1e-4        # relative to the largest value: float32 sums in another order
ENCODERS: dict[str, dict[str, Any]] = {
    "as MiniLM": {},
    "token types, first token": {"token_types": True, "pooling": "first"},
    "opset 11": {"style": Style(norm="div"), "opset": 11},
    "opset 13, tanh, where": {"style": Style(norm="reciprocal", gelu="tanh", mask="where"), "opset": 13},
    "one product for q, k and v": {"style": Style(together=True, mask="none")},
    "width of no whole vector": {"width": 20, "length": 7},
}
EVERY_ENCODER = pytest.mark.parametrize("options", ENCODERS.values(), ids=ENCODERS)


def text_engine(model: onnx.ModelProto, folder: Path, **options: Any) -> Engine:
    onnx.save(model, folder / "model.onnx")
    calibration = None
    if options.get("precision") == "int8":
        np.savez(folder / "calibration.npz", **tokens(model, 32, seed=100))     # type: ignore[arg-type]
        calibration = Calibration(folder / "calibration.npz", "minmax")
    return Engine(build_engine(folder / "model.onnx", calibration=calibration, cache=False, max_batch=MAX_BATCH,
                               timing=False, **options).plan)


@EVERY_ENCODER
def test_a_sentence_encoder_agrees_with_onnx_runtime(options: dict[str, Any], tmp_path: Path) -> None:
    model = sentence_encoder(**options)
    engine = text_engine(model, tmp_path)
    feeds = tokens(model, MAX_BATCH - 1, seed=1)
    expected = run_onnx(model, feeds)
    for output, value in engine.run(feeds).items():
        assert relative_error(value, expected[output]) < TOLERANCE
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]


@pytest.mark.parametrize("norm", ("operator", "div", "reciprocal"))
def test_a_layer_norm_is_one_kernel_however_it_is_written(norm: str, tmp_path: Path) -> None:
    engine = text_engine(sentence_encoder(style=Style(norm=norm), layers=1), tmp_path)
    assert sum(step.tactic.startswith("norm") for step in engine.plan.machine.steps) == 4   # the last is of unit length
    assert not any("Sqrt" in step.name for step in engine.plan.machine.steps)


def test_a_quantised_sentence_encoder_is_near_the_float_one(tmp_path: Path) -> None:
    model = sentence_encoder(style=Style(mask="where"))
    engine = text_engine(model, tmp_path, precision="int8")
    feeds = tokens(model, MAX_BATCH, seed=1)
    expected, found = run_onnx(model, feeds)["embedding"], engine.run(feeds)["embedding"]
    assert (expected * found).sum(1).min() > 0.99
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]


@pytest.mark.parametrize("batch", ("N", 1))
@pytest.mark.parametrize("build", (vit, recogniser))
def test_an_image_transformer_agrees_with_onnx_runtime(build: Any, batch: str | int, tmp_path: Path) -> None:
    model = build(classes=10, batch=batch)
    engine = engine_of(model, tmp_path)
    x = images_for(model, 1 if batch == 1 else MAX_BATCH - 1, seed=1)
    expected = run_onnx(model, {"input": x})["output"]
    assert relative_error(engine.run({"input": x})["output"], expected) < TOLERANCE
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]
