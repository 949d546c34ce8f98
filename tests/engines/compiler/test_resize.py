"""Resize with scales that float32 rounds, against ONNX Runtime: extents, ties and align_corners."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession

from infer_server.engines import build_engine
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from scripts.testing.resize_cases import (
    FAMILIES,
    Case,
    by_kernels,
    by_reference,
    fault,
    model_of,
    onnx_runtime,
    sampled,
)

COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")


def resize_model(shape: tuple[int, ...], scales: tuple[float, ...], **attrs: Any) -> onnx.ModelProto:
    """Resize x [1, 2, height, width] along both last axes, or rows [1, 2, length]."""
    numbers = {"scales": np.array([1, 1, *scales], np.float32)}
    return model_of(np.dtype(np.float32), (1, 2, *shape), ["x", "", "scales"], numbers, attrs, 18)


def expected(model: onnx.ModelProto, x: Any) -> Any:
    return InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_nodes_agree_with_onnx_runtime(family: str) -> None:
    for seed in range(150):
        case = sampled(seed, family)
        assert not fault(case, by_reference(case), right(case))


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_random_nodes_agree_with_onnx_runtime(family: str) -> None:
    for seed in range(12):
        case = sampled(seed, family)
        assert not fault(case, by_kernels(case), right(case))


@pytest.mark.parametrize("made", [by_reference, by_kernels])
@pytest.mark.parametrize("family, dtypes", [
    ("nearest", ["uint8", "int32"]), ("linear", ["uint8", "int8", "int32"]), ("antialias", ["uint8", "int32"])])
def test_integers_are_rounded_as_by_onnx_runtime(family: str, dtypes: list[str], made: Callable[[Case], Any]) -> None:
    for seed in range(12):
        case = sampled(seed, family, dtypes)
        assert not fault(case, made(case), right(case))


def right(case: Case) -> Any:
    made = onnx_runtime(case)
    assert made is not None, case
    return made


def test_a_region_of_interest_crops_no_axis_of_scale_1() -> None:
    attrs = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear", "extrapolation_value": 7.0}
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    roi = {"roi": np.float32([0.4, 0.4, 0.4, 0, 0.6, 0.6, 0.6, 1]), "scales": np.float32([1, 1, 1, 2])}
    case = Case(model_of(x.dtype, x.shape, ["x", "roi", "scales"], roi, attrs, 18), x, "linear")
    assert not fault(case, by_kernels(case), right(case))
    np.testing.assert_array_equal(by_kernels(case)[..., [0, -1]], x[..., [0, -1]])


# images have a kernel with tables of taps; rows are a nest that computes where it reads
@pytest.mark.parametrize("shape", [(9, 13), (13,)])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_kernels_take_the_same_pixels(coordinates: str, mode: str, shape: tuple[int, ...]) -> None:
    if mode == "cubic" and len(shape) == 1:
        pytest.skip("ONNX Runtime has cubic of images alone")
    model = resize_model(shape, (1.7,) * len(shape), mode=mode, coordinate_transformation_mode=coordinates)
    x = np.random.default_rng(1).standard_normal((1, 2, *shape)).astype(np.float32)
    made = build_engine(model, timing=False, cache=False).engine(threads=1).run({"x": x})["y"]
    np.testing.assert_allclose(made, expected(model, x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_corners_are_aligned_where_the_length_is_no_integer(mode: str) -> None:
    """9 x 13 scaled by 1.5 is 13.5 x 19.5, which becomes 13 x 19."""
    model = resize_model((9, 13), (1.5, 1.5), mode=mode, coordinate_transformation_mode="align_corners")
    x = np.random.default_rng(1).standard_normal((1, 2, 9, 13)).astype(np.float32)
    made = build_engine(model, timing=False, cache=False).engine(threads=1).run({"x": x})["y"]
    assert made.shape == (1, 2, 13, 19)
    np.testing.assert_allclose(made[:, :, ::12, ::18], x[:, :, ::8, ::12], rtol=0, atol=1e-5)
    np.testing.assert_allclose(made, expected(model, x), rtol=0, atol=1e-4)


def test_an_extent_is_a_product_in_float32() -> None:
    """float32(0.7) * 10 is 6.99999988 in double precision and 7 in single precision."""
    graph = graph_from_onnx(resize_model((10, 10), (0.7, 1.3), mode="nearest"))
    assert graph.shape("y") == (1, 2, 7, 13)


def test_an_antialiased_axis_that_keeps_its_extent_is_left_as_it_is() -> None:
    model = resize_model((6, 20), (1.1, 0.5), mode="linear", antialias=1)
    x = np.random.default_rng(1).standard_normal((1, 2, 6, 20)).astype(np.float32)
    made = build_engine(model, timing=False, cache=False).engine(threads=1).run({"x": x})["y"]
    np.testing.assert_allclose(made, expected(model, x), rtol=0, atol=1e-4)
