"""Resize with scales that float32 rounds, against ONNX Runtime: extents, ties and align_corners."""
from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime import InferenceSession

from engines import build_engine
from engines.frontend.onnx_import import graph_from_onnx
from engines.ops import reference

SCALES = (0.3, 1 / 3, 0.5, 0.6, 2 / 3, 0.7, 1.1, 1.25, 1.3, 4 / 3, 1.5, 1.7, 2.0, 2.4, 3.0)
COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")


def resize_model(shape: tuple[int, ...], scales: tuple[float, ...], by_sizes: bool = False,
                 **attrs: Any) -> onnx.ModelProto:
    """Resize x [1, 2, height, width] along both last axes, or rows [1, 2, length]."""
    last = [1, 1, *scales]
    numbers = np.array(last, np.float32) if not by_sizes else np.array(
        [max(int(size * scale), 1) for size, scale in zip((1, 2, *shape), last, strict=True)], np.int64)
    inputs = ["x", "", "", "last"] if by_sizes else ["x", "", "last"]
    graph = helper.make_graph(
        [helper.make_node("Resize", inputs, ["y"], **attrs)], "resize",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 2, *shape])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["a", "b", *(f"s{i}" for i in range(len(shape)))])],
        [numpy_helper.from_array(numbers, "last")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def expected(model: onnx.ModelProto, x: Any) -> Any:
    return InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]


@pytest.mark.parametrize("by_sizes", [False, True])
@pytest.mark.parametrize("mode", ["linear", "cubic", "round_prefer_floor", "round_prefer_ceil"])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_sampled_configurations_agree_with_onnx_runtime(coordinates: str, mode: str, by_sizes: bool) -> None:
    random = np.random.default_rng(0)
    attrs = {"mode": mode} if mode in ("linear", "cubic") else {"mode": "nearest", "nearest_mode": mode}
    for _ in range(8):
        shape = tuple(map(int, random.integers(4, 30, 2)))
        scales = tuple(map(float, random.choice(SCALES, 2)))
        model = resize_model(shape, scales, by_sizes, coordinate_transformation_mode=coordinates, **attrs)
        x = random.standard_normal((1, 2, *shape)).astype(np.float32)
        made, = reference.run(graph_from_onnx(model), {"x": x}).values()
        np.testing.assert_allclose(made, expected(model, x), rtol=0, atol=1e-4, err_msg=f"{shape} by {scales}")


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
    """9 x 13 by 1.5 is 13 x 19, of 13.5 x 19.5."""
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
