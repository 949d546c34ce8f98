"""Calibration data that cannot be right are told, and those that can be are not."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from PIL import Image

from infer_server.calibration import Calibration
from infer_server.calibration.accuracy.verify import verify
from infer_server.calibration.data.checks import DataCheck
from infer_server.calibration.open_data import open_calibration_data
from infer_server.cli import inspect_engine
from infer_server.engines import build_engine
from infer_server.engines.errors import CalibrationError
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.preprocess import IMAGENET, PRESETS, Preprocess

X = IoTensor("x", "float32", ("batch", 3, 8, 8))
GRAY = IoTensor("x", "float32", ("batch", 1, 8, 8))
STATE = IoTensor("state", "float32", ("batch", 16))
RNG = np.random.default_rng(0)


def images(count: int = 8) -> Array:
    return RNG.uniform(-2, 2, (count, 3, 8, 8)).astype(np.float32)


def warnings(*feeds: dict[str, Array], inputs: tuple[IoTensor, ...] = (X,), declared: Preprocess | None = None) -> str:
    check = DataCheck(inputs, declared)
    for feed in feeds:
        check.observe(feed)
    return "\n".join(check.warnings())


# ---- items
@pytest.mark.parametrize("values, complaint", [
    (np.zeros((8, 3, 8, 8), np.float32), "'x' is 0 everywhere"),
    (np.ones((8, 3, 8, 8), np.float32) * 7, "'x' is 7 everywhere"),
    (np.ones((8, 3, 8, 8), np.float32) * np.arange(8, dtype=np.float32)[:, None, None, None], "constant within each"),
    (np.repeat(images(1), 8, axis=0), "all 8 calibration items are equal"),
    (images(3), "there are 3 calibration items")])
def test_data_that_cannot_be_right_are_told(values: Array, complaint: str) -> None:
    found = warnings({"x": values[:3]}, {"x": values[3:]}) if len(values) > 3 else warnings({"x": values})
    assert complaint in found


def test_usual_data_are_not_doubted() -> None:
    zeros = np.zeros((8, 16), np.float32)
    assert warnings({"x": images(), "state": zeros}, inputs=(X, STATE)) == ""
    mask = IoTensor("mask", "int64", ("batch", 4))
    assert warnings({"mask": np.ones((8, 4), np.int64), "x": images()}, inputs=(mask, X)) == ""
    assert warnings({"x": images()}, declared=IMAGENET.fit(X.shape)) == ""


@pytest.mark.parametrize("scale, complaint", [(1 / 255, "use little of the range"), (100, "do not come from it")])
def test_a_declared_preprocessing_that_the_data_contradict_is_told(scale: float, complaint: str) -> None:
    assert complaint in warnings({"x": images() * np.float32(scale)}, declared=IMAGENET.fit(X.shape))


@pytest.mark.parametrize("changes, told", [
    ({"scale": 1.0}, "scales pixels to 0 to 255, and its mean, up to 0.485, is one of pixels of 0 to 1"),
    ({"mean": (123.7, 116.3, 103.5), "std": (58.4, 57.1, 57.4)}, "divide mean and std by 255")])
def test_a_mean_of_another_scale_is_told(changes: dict[str, Any], told: str) -> None:
    declared = replace(IMAGENET, **changes).fit(X.shape)
    assert told in warnings({"x": images()}, declared=declared)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_is_doubted(preset: str) -> None:
    declared = PRESETS[preset]
    low, high = declared.range
    values = RNG.uniform(low, high, (8, 3, 8, 8)).astype(np.float32)
    assert warnings({"x": values}, declared=declared) == ""


def test_items_of_which_most_are_equal_are_told() -> None:
    few = images(3)
    assert "only 3 of 9 calibration items are different" in warnings({"x": np.concatenate([few, few, few])})
    assert warnings({"x": np.concatenate([images(8), few[:1], few[:1]])}) == ""


def test_integers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.full((2, 8, 8, 3), 300, np.uint16))
    data = open_calibration_data(tmp_path, [IoTensor("x", "uint8", ("batch", 8, 8, 3))])
    with pytest.raises(CalibrationError, match="'x' holds 300 to 300; the model takes uint8, 0 to 255"):
        list(data)


# ---- pictures
def pictures(folder: Path, *arrays: Array, suffix: str = "tif") -> Path:
    for number, array in enumerate(arrays):
        Image.fromarray(array).save(folder / f"{number}.{suffix}")
    return folder


@pytest.mark.parametrize("most", [1.0, 255.0])
def test_pictures_of_floats_are_read_with_their_precision(tmp_path: Path, most: float) -> None:
    values = RNG.random((2, 8, 8), np.float32)
    values[:, 0, 0], values[:, 0, 1] = 0, 1
    data = open_calibration_data(pictures(tmp_path, *values * np.float32(most)), [GRAY])
    np.testing.assert_allclose(np.concatenate([item["x"] for item in data])[:, 0], values, atol=1e-5)
    assert "pictures of floats (0.tif, ...) are read as 0 to" in data.warnings[0]


def test_dark_pictures_of_floats_are_scaled_as_the_others_are(tmp_path: Path) -> None:
    bright, dark = np.full((8, 8), 200, np.float32), np.full((8, 8), 0.5, np.float32)
    first, second = open_calibration_data(pictures(tmp_path, bright, dark), [GRAY])
    assert first["x"].max() == pytest.approx(200 / 255) and second["x"].max() == pytest.approx(0.5 / 255)


@pytest.mark.parametrize("low, high", [(-1.0, 1.0), (0.0, 4000.0)])
def test_pictures_of_other_floats_are_refused(tmp_path: Path, low: float, high: float) -> None:
    array = np.linspace(low, high, 64, dtype=np.float32).reshape(8, 8)
    with pytest.raises(CalibrationError, match="give others as .npz files"):
        open_calibration_data(pictures(tmp_path, array), [GRAY])


def test_pictures_of_16_bits_are_told_and_dark_ones_doubted(tmp_path: Path) -> None:
    arrays = [RNG.integers(0, 4096, (8, 8)).astype(np.uint16) for _ in range(8)]      # 12 bits of a camera
    data = open_calibration_data(pictures(tmp_path, *arrays, suffix="png"), [GRAY])
    assert "pictures of 16 bits" in data.warnings[0]
    assert "use little of the range of 0 to 255" in warnings(*data, inputs=(GRAY,), declared=data.preprocess)


def test_pictures_of_more_bits_are_refused(tmp_path: Path) -> None:
    data = open_calibration_data(pictures(tmp_path, np.full((8, 8), 1 << 20, np.int32)), [GRAY])
    with pytest.raises(CalibrationError, match="more than 16 bits"):
        list(data)


@pytest.mark.parametrize("dtype, shape", [("float32", ("batch", 4, 8, 8)), ("uint8", ("batch", 8, 8, 4))])
def test_an_input_of_four_channels_takes_rgba(tmp_path: Path, dtype: str, shape: tuple[int | str, ...]) -> None:
    pixels = RNG.integers(0, 256, (8, 8, 4)).astype(np.uint8)
    pixels[..., 3] = 255
    item, = open_calibration_data(pictures(tmp_path, pixels, suffix="png"), [IoTensor("x", dtype, shape)])
    expected = pixels if dtype == "uint8" else pixels.transpose(2, 0, 1) / 255
    np.testing.assert_allclose(item["x"][0], expected, atol=1e-6)


# ---- builds
def model(folder: Path) -> Path:
    text = '<ir_version: 8, opset_import: ["" : 17]> m (float[N,8] x) => (float[N,4] y) ' \
           "{ h = MatMul(x, a)  r = Relu(h)  b = MatMul(r, c)  y = Sigmoid(b) }"
    made = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    for name, shape, scale in (("a", (8, 16), 1.5e4), ("c", (16, 4), 1e-5)):
        array = (scale * random.standard_normal(shape)).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(made, folder / "m.onnx")
    return folder / "m.onnx"


def test_the_note_stands_in_the_plan_and_is_kept_with_cached_ranges(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for attempt in range(2):
        calibration = Calibration([{"x": np.zeros((8, 8), np.float32)}], "minmax", tmp_path / "ranges.json")
        build = build_engine(model(tmp_path), precision="int8", calibration=calibration, cache=False, timing=False)
        assert any("'x' is 0 everywhere" in notice for notice in build.notices), attempt
    build.save(tmp_path / "m.plan")
    assert inspect_engine.main([str(tmp_path / "m.plan")]) == 0
    assert "'x' is 0 everywhere" in capsys.readouterr().out


def test_verifying_on_zeros_is_told(tmp_path: Path) -> None:
    build_engine(model(tmp_path), cache=False, timing=False).save(tmp_path / "m.plan")
    inputs = [IoTensor("x", "float32", ("batch", 8))]
    data = open_calibration_data(lambda: [{"x": np.zeros((8, 8), np.float32)}], inputs)
    assert "'x' is 0 everywhere" in verify(tmp_path / "m.plan", tmp_path / "m.onnx", data).notes[0]


def test_values_beyond_float16_are_told_at_the_build_and_by_verifying(tmp_path: Path) -> None:
    feeds = [{"x": 3 * RNG.standard_normal((8, 8)).astype(np.float32)}]
    options = {"precision": "fp16", "cache": False, "timing": False}
    build = build_engine(model(tmp_path), calibration=Calibration(feeds), **options)
    notice, = (notice for notice in build.plan.metadata["notices"] if "exceed 65504" in notice)
    assert "'r' reaches" in notice
    build.save(tmp_path / "m.plan")
    assert any("exceed 65504" in note for note in verify(tmp_path / "m.plan", tmp_path / "m.onnx").notes)
    small = build_engine(model(tmp_path), calibration=Calibration([{"x": feeds[0]["x"] / 100}]), **options)
    assert not any("exceed" in notice for notice in small.notices)
