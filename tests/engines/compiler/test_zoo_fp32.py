"""Float32 engines of the zoo give ONNX Runtime's results."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engines.compiler.zoo_engines import MAX_BATCH, engine_of, fallbacks, relative_error
from tests.zoo import TINY, images_for, run_onnx
from tests.zoo.variants import save_with_external_data, with_constant_nodes, with_initializers_as_inputs

TOLERANCE = 1e-4        # relative to the largest value: float32 sums in another order
EVERY = pytest.mark.parametrize("name", TINY)


@EVERY
def test_an_engine_agrees_with_onnx_runtime_and_every_layer_has_a_kernel(name: str, tmp_path: Path) -> None:
    model = TINY[name]()
    engine = engine_of(model, tmp_path)
    x = images_for(model, MAX_BATCH - 1, seed=1)
    expected = run_onnx(model, {"input": x})
    values = engine.run({"input": x})
    assert list(values) == [output.name for output in model.graph.output]
    for output, value in values.items():
        assert relative_error(value, expected[output]) < TOLERANCE
    assert not fallbacks(engine), [f"{step.name}: {step.reason}" for step in fallbacks(engine)]


@pytest.mark.parametrize("name", ("resnet18", "mobilenet_v3", "shufflenet_v2", "yolo_v5"))
def test_a_fixed_batch_of_one_is_an_engine_of_that_shape(name: str, tmp_path: Path) -> None:
    model = TINY[name](batch=1)
    engine = engine_of(model, tmp_path)
    x = images_for(model, 1, seed=1)
    assert engine.inputs[0].shape == x.shape
    expected = run_onnx(model, {"input": x})
    for output, value in engine.run({"input": x}).items():
        assert relative_error(value, expected[output]) < TOLERANCE


@pytest.mark.parametrize("variant", (with_initializers_as_inputs, with_constant_nodes))
def test_weights_may_be_inputs_or_constant_nodes(variant, tmp_path: Path) -> None:
    model = TINY["mobilenet_v2"]()
    x = images_for(model, 2, seed=1)
    engine = engine_of(variant(model), tmp_path)
    assert [tensor.name for tensor in engine.inputs] == ["input"]
    assert relative_error(engine.run({"input": x})["output"], run_onnx(model, {"input": x})["output"]) < TOLERANCE


def test_weights_may_lie_in_a_file_beside_the_model(tmp_path: Path) -> None:
    model = TINY["mobilenet_v2"]()
    x = images_for(model, 2, seed=1)
    save_with_external_data(model, tmp_path / "model.onnx")
    engine = engine_of(model, tmp_path)
    assert relative_error(engine.run({"input": x})["output"], run_onnx(model, {"input": x})["output"]) < TOLERANCE


def test_an_item_has_the_same_answer_alone_and_in_any_batch(tmp_path: Path) -> None:
    model = TINY["resnet18"]()
    engine = engine_of(model, tmp_path)
    x = images_for(model, 2 * MAX_BATCH + 1, seed=1)
    together = engine.run({"input": x})["output"]
    for index in range(len(x)):
        np.testing.assert_array_equal(engine.run({"input": x[index:index + 1]})["output"][0], together[index])
