"""QuantizeLinear and DequantizeLinear give the bits of ONNX's reference."""
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ops.reference import run
from tests.zoo import run_onnx

RANDOM = np.random.default_rng(5)
BITS = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}
SCALES = np.concatenate([RANDOM.uniform(1e-3, 1e-1, 61), [0.5, 1.0, 3.0]]).astype(np.float32)    # 1 / 3 is no float


def model(op: str, x: NDArray[Any], scale: NDArray[Any], zero_point: NDArray[Any],
          **attributes: Any) -> onnx.ModelProto:
    made = zero_point.dtype if op == "QuantizeLinear" else scale.dtype
    names = {"x": x, "scale": scale, "zero_point": zero_point}
    types = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), x.shape)
             for name, dtype in (("x", x.dtype), ("y", np.dtype(made)))]
    graph = helper.make_graph([helper.make_node(op, list(names), ["y"], **attributes)], "g", types[:1], types[1:],
                              [numpy_helper.from_array(names[name], name) for name in ("scale", "zero_point")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def assert_same(proto: onnx.ModelProto, x: NDArray[Any]) -> None:
    expected, = ReferenceEvaluator(proto).run(None, {"x": x})
    value = run(graph_from_onnx(proto), {"x": x})["y"]
    assert value.dtype == expected.dtype
    np.testing.assert_array_equal(value, expected)


def halves(scale: NDArray[Any], low: int, high: int) -> NDArray[Any]:
    """Return numbers around the midpoints between integers and far outside the range, in a row for each scale."""
    borders = np.unique(np.concatenate([RANDOM.integers(low - 40, high + 40, 300), [low, high, -1, 0, 1]])) + 0.5
    exact = (borders.astype(np.float32) * scale.astype(np.float32)[:, None]).astype(scale.dtype)
    return np.concatenate([exact, np.nextafter(exact, np.asarray(np.inf, scale.dtype)),
                           np.nextafter(exact, np.asarray(-np.inf, scale.dtype)), exact * 1000], axis=1)


@pytest.mark.parametrize("stored", BITS)
@pytest.mark.parametrize("per_axis", [False, True])
def test_halves_are_rounded_to_even_before_the_zero_point_is_added(stored: str, per_axis: bool) -> None:
    low, high = BITS[stored]
    for start in (0,) if per_axis else range(0, len(SCALES), 8):
        scale = SCALES if per_axis else SCALES[start]
        points = RANDOM.integers(low, high, np.shape(scale)).astype(stored) | 1     # odd ones tell the two orders apart
        x = halves(np.atleast_1d(scale), low, high)
        assert_same(model("QuantizeLinear", x, np.asarray(scale), np.asarray(points), axis=0), x)


def test_float16_is_divided_in_float32_as_onnx_runtime_does() -> None:
    """Before opset 23 ONNX leaves it open; its reference divides in float16, which moves some values by a step."""
    scale = SCALES.astype(np.float16)
    with np.errstate(over="ignore"):
        x = halves(scale, 0, 255)
    x = x[:, np.isfinite(x).all(axis=0)]
    proto = model("QuantizeLinear", x, scale, np.full(len(scale), 113, np.uint8), axis=0)
    np.testing.assert_array_equal(run(graph_from_onnx(proto), {"x": x})["y"], run_onnx(proto, {"x": x})["y"])


@pytest.mark.parametrize("stored", [*BITS, "int32"])
@pytest.mark.parametrize("real", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["float32", "float16", "bfloat16"])
def test_integers_become_real_numbers_of_the_scales_type(stored: str, real: Any) -> None:
    low, high = BITS.get(stored, (-2000, 2000))
    x = RANDOM.integers(low, high, (len(SCALES), 50)).astype(stored)
    points = RANDOM.integers(low, high, len(SCALES)) * (stored != "int32")     # biases have none
    scale = (SCALES / 8).astype(real)       # 65504 is the largest float16
    assert_same(model("DequantizeLinear", x, scale, points.astype(stored), axis=0), x)


def test_blocks_of_an_axis_have_a_scale_each() -> None:
    scale, points = SCALES[:24].reshape(6, 4), RANDOM.integers(0, 255, (6, 4)).astype(np.uint8)
    x = RANDOM.integers(0, 255, (6, 12)).astype(np.uint8)
    assert_same(model("DequantizeLinear", x, scale, points, axis=1, block_size=3), x)
    real = RANDOM.standard_normal((6, 12)).astype(np.float32)
    assert_same(model("QuantizeLinear", real, scale, points, axis=1, block_size=3), real)
