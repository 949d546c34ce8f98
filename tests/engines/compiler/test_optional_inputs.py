"""Inputs with a default value, which a run may omit."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from infer_server.engines import build_engine, load_engine
from infer_server.engines.errors import InputError, ModelError
from tests.engines.compiler.small_models import node, small_model

SCALE = np.array([[1, 2, 3, 4]], np.float32)
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def model(x: tuple[object, ...] = ("N", 4), scale: tuple[object, ...] = ("N", 4)) -> onnx.ModelProto:
    return small_model([node("Mul", "x scale", "scaled"), node("Relu", "scaled", "y")], {"x": x, "scale": scale}, ["y"],
                       {"scale": SCALE})


def test_an_input_that_is_left_out_has_its_value_in_the_model_for_each_item(tmp_path: Path) -> None:
    build_engine(model(), optional=("scale",), max_batch=2, timing=False, cache=False).save(tmp_path / "m.plan")
    engine = load_engine(tmp_path / "m.plan")
    for _ in range(2):
        np.testing.assert_array_equal(engine.run({"x": X})["y"], X * SCALE)
        np.testing.assert_array_equal(engine.run({"x": X, "scale": X + 1})["y"], X * (X + 1))
    with pytest.raises(InputError, match="input 'x' is missing"):
        engine.run({"scale": X})


def test_so_it_has_where_extents_are_open_and_without_a_batch(tmp_path: Path) -> None:
    build_engine(model(("N", "L", 4), (1, 4)), optional=("scale",), timing=False, cache=False).save(tmp_path / "m.plan")
    opened = load_engine(tmp_path / "m.plan", specialise="wait", cache=False)
    assert {io.name: len(io.shape) for io in opened.inputs} == {"x": 3, "scale": 2}
    for length in (1, 3):
        x = np.stack([X[:length]] * 2)
        np.testing.assert_array_equal(opened.run({"x": x})["y"], x * SCALE)
        np.testing.assert_array_equal(opened.run({"x": x, "scale": SCALE + 1})["y"], x * (SCALE + 1))


def test_without_the_option_it_is_a_constant_and_no_other_input_is_optional() -> None:
    assert [io.name for io in build_engine(model(), timing=False, cache=False).plan.inputs] == ["x"]
    for name, of in (("x", model()), ("y", model())):
        with pytest.raises(ModelError, match=f"optional input '{name}' has no default"):
            build_engine(of, optional=(name,), timing=False, cache=False)
    two = small_model([node("Mul", "x scale", "y")], {"x": ("N", 4), "scale": ("N", 4)}, ["y"],
                      {"scale": np.ones((2, 4), np.float32)})
    with pytest.raises(ModelError, match=r"its value of shape \[2, 4\] is not that of one item"):
        build_engine(two, optional=("scale",), timing=False, cache=False)
