"""Layers of an INT8 build that compute in float32 beside others that compute in bfloat16 or float16."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.calibration.workflow import Calibration
from infer_server.engines.compiler.build import EngineBuild, build_engine
from infer_server.engines.errors import ConfigError
from infer_server.engines.loading import load_engine
from tests.engines.compiler.small_models import feeds_of, small_model
from tests.zoo import run_onnx

LAYERS = ("a", "b", "c", "d")


def model(size: int | str = 8) -> onnx.ModelProto:
    """Return four 1x1 convolutions in a row."""
    random = np.random.default_rng(0)
    weights = {f"{name}.w": (random.standard_normal((16, 16, 1, 1)) / 4).astype(np.float32) for name in LAYERS}
    nodes = [helper.make_node("Conv", [x, f"{name}.w"], ["y" if name == "d" else f"{name}.y"], name=name)
             for name, x in zip(LAYERS, ("x", "a.y", "b.y", "c.y"), strict=True)]
    return small_model(nodes, {"x": ["N", 16, size, size]}, ["y"], weights)


def built(source: onnx.ModelProto, **options: Any) -> EngineBuild:
    feeds = [{"x": np.random.default_rng(seed).standard_normal((1, 16, 8, 8)).astype(np.float32)} for seed in range(8)]
    return build_engine(source, precision="int8", calibration=Calibration(feeds, "minmax"), timing=False, cache=False,
                        **options)


def precisions(build: EngineBuild) -> dict[str, str]:
    return {name: step.precision for step in build.plan.machine.steps for name in step.fuses if name in LAYERS}


@pytest.mark.parametrize("float_type", ["bf16", "fp16"])
def test_kept_layers_compute_in_two_precisions(float_type: str) -> None:
    build = built(model(), keep_float=("b", "c", "d"), float_type=float_type, keep_fp32=("c",))
    assert precisions(build) == {"a": "int8", "b": float_type, "c": "fp32", "d": float_type}
    x = feeds_of(model())
    assert sqnr_db(run_onnx(model(), x)["y"], build.engine().run(x)["y"]) > 30


def test_float32_layers_are_as_exact_as_without_the_other_precision() -> None:
    """Between float32 layers, tensors are stored in float32: bfloat16 would cost some 15 dB."""
    x, every = feeds_of(model()), LAYERS
    expected = run_onnx(model(), x)["y"]
    found = {kept: sqnr_db(expected, built(model(), keep_float=every, float_type="bf16", keep_fp32=kept).engine().run(
        x)["y"]) for kept in ((), ("c", "d"), every)}
    assert found[()] < 60 and found[()] < found["c", "d"] and found[every] > 100, found


def test_shapes_that_are_specialised_later_keep_the_precisions(tmp_path: Path) -> None:
    build = built(model("size"), keep_float=("b", "c"), float_type="bf16", keep_fp32=("c",))
    build.save(tmp_path / "m.plan")
    engine = load_engine(tmp_path / "m.plan")
    assert engine.plan.open is not None and engine.plan.open.options.keep_fp32 == ("c",)
    x = {"x": np.random.default_rng(9).standard_normal((1, 16, 5, 5)).astype(np.float32)}
    assert sqnr_db(run_onnx(model(5), x)["y"], engine.run(x)["y"]) > 30


@pytest.mark.parametrize(("options", "message"), [
    ({"keep_float": ("b",), "keep_fp32": ("b",)}, "this build's is fp32"),
    ({"keep_float": ("b",), "keep_fp32": ("c",), "float_type": "bf16"}, "'c' is not among the nodes"),
    ({"keep_float": ("b",), "keep_fp32": ("none",), "float_type": "bf16"}, "'none' is not among the nodes")])
def test_names_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(model(), **options)
