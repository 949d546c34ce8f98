"""Every model of the zoo is valid, runs, and is well-conditioned enough for comparisons."""
from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest

import benchmarks.zoo
from benchmarks.zoo.pictures import probe_items
from benchmarks.zoo.statistics import measure
from tests.zoo import TINY, ZOO, images, images_for, run_onnx
from tests.zoo.variants import save_with_external_data, with_constant_nodes, with_initializers_as_inputs

EVERY = pytest.mark.parametrize("name", TINY)
model_of = cache(lambda name: TINY[name]())
NEEDS = {"mobilenet_v3_by_op": 14, "yolo_v5": 10}       # HardSwish; Slice with steps
DIFFERS = {"nanodet": 11, "deeplab": 11, "views": 10}   # before: no half pixels in Resize, no steps in Slice


@EVERY
def test_a_model_is_valid_and_its_declared_shapes_are_the_real_ones(name: str) -> None:
    model = model_of(name)
    onnx.checker.check_model(model, full_check=True)
    values = run_onnx(model, {"input": images_for(model, 3)})
    for output in model.graph.output:
        declared = [d.dim_value or d.dim_param for d in output.type.tensor_type.shape.dim]
        assert declared == ["N", *values[output.name].shape[1:]]
        assert len(values[output.name]) == 3


@EVERY
def test_outputs_are_finite_and_tell_pictures_apart(name: str) -> None:
    model = model_of(name)
    for value in run_onnx(model, {"input": images_for(model, 8, seed=1)}).values():
        largest = np.abs(value).max()
        assert np.isfinite(largest)
        assert 1e-2 < largest < 1e2
        assert value.std(axis=0).max() > 0.01 * largest


@pytest.mark.parametrize("opset", (9, 11, 21))
@EVERY
def test_a_model_says_the_same_in_every_operator_set(name: str, opset: int) -> None:
    if opset < NEEDS.get(name, 9):
        pytest.skip(f"{name} needs opset {NEEDS[name]}")
    model = TINY[name](opset=opset)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == opset
    x = images_for(model, 2)
    expected = run_onnx(model_of(name), {"input": x})
    for output, value in run_onnx(model, {"input": x}).items():
        assert np.isfinite(value).all() and value.shape == expected[output].shape
        if opset >= DIFFERS.get(name, 9):
            np.testing.assert_allclose(value, expected[output], rtol=1e-3, atol=1e-3)


@EVERY
def test_a_fixed_batch_of_one_gives_the_answers_of_the_symbolic_one(name: str) -> None:
    symbolic, fixed = model_of(name), TINY[name](batch=1)
    x = images_for(fixed, 1, seed=3)
    expected = run_onnx(symbolic, {"input": x})
    for output, value in run_onnx(fixed, {"input": x}).items():
        np.testing.assert_allclose(value, expected[output], rtol=1e-4, atol=1e-5)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not() -> None:
    build = benchmarks.zoo.TINY["mobilenet_v2"]
    assert build().SerializeToString() == build().SerializeToString()
    assert build(seed=1).SerializeToString() != build().SerializeToString()


def test_batch_normalisation_holds_the_statistics_of_what_reaches_it() -> None:
    model = TINY["resnet18"]()
    held = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    for name, value in measure(model, {"input": images(probe_items(32), size=32)}).items():
        np.testing.assert_allclose(held[name], value, rtol=1e-5, atol=1e-6)
    elsewhere = measure(model, {"input": images(probe_items(32), size=32, seed=1)})
    assert any(not np.allclose(held[name], value, rtol=0.01) for name, value in elsewhere.items())


def test_names_are_those_of_an_export() -> None:
    nodes = {node.name: node for node in TINY["resnet18"]().graph.node}
    conv = nodes["/layer2.0/conv1/Conv"]
    assert list(conv.output) == ["/layer2.0/conv1/Conv_output_0"]
    assert conv.input[1] == "layer2.0.conv1.weight"


def test_resnet50_at_full_size_is_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("benchmarks.zoo.architecture")
    monkeypatch.setattr(module, "_normalised", lambda model, *_: model)     # statistics of pictures take long
    build = ZOO["resnet50"]
    parameters = sum(np.prod(i.dims) for i in build(size=32).graph.initializer)
    assert parameters == 25_557_032 + 2 * 26_560          # torchvision's count, and the running statistics


@pytest.mark.parametrize("variant", (with_initializers_as_inputs, with_constant_nodes))
def test_a_variant_of_a_file_computes_the_same(variant) -> None:
    model = TINY["mobilenet_v2"]()
    x = images_for(model, 2)
    other = variant(model)
    onnx.checker.check_model(other, full_check=True)
    expected = run_onnx(model, {"input": x})["output"]      # with BN folded into Conv, and `other` perhaps without
    np.testing.assert_allclose(run_onnx(other, {"input": x})["output"], expected, rtol=1e-3, atol=1e-4)


def test_external_data_lies_beside_the_model(tmp_path: Path) -> None:
    model = TINY["mobilenet_v2"]()
    x = images_for(model, 2)
    path = save_with_external_data(model, tmp_path / "m.onnx")
    assert path.stat().st_size < (tmp_path / "m.onnx.data").stat().st_size
    np.testing.assert_array_equal(run_onnx(path, {"input": x})["output"], run_onnx(model, {"input": x})["output"])
