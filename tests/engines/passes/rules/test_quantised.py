"""Q/DQ pairs become FakeQuantize nodes after the computation; single Q or DQ nodes become arithmetic."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infer_server.engines.ir.graph import Graph
from infer_server.engines.passes.pipeline import simplify
from tests.engines.passes.build import Build, keeps, ops

EXACT = {"rtol": 0, "atol": 1e-6}


MIDDLE = np.uint8(128)


def pair(net: Build, x: str, scale: float = 0.1, zero: Any = MIDDLE) -> str:
    step, point = net.constant(np.float32(scale)), net.constant(zero)
    result: str = net("DequantizeLinear", net("QuantizeLinear", x, step, point), step, point)
    return result


def simple(net: Build, *outputs: str) -> Graph:
    return keeps(simplify, net.graph(*outputs))


@pytest.mark.parametrize(("zero", "point", "low", "high"), [
    (np.uint8(3), 3, 0, 255), (np.int8(-5), 123, 0, 255), (np.int16(7), 7, -32768, 32767),
    (np.uint16(9), 9, 0, 65535)], ids=str)
def test_a_pair_is_a_fake_quantize_of_uint8_where_eight_bits_are_enough(zero: Any, point: int, low: int,
                                                                        high: int) -> None:
    net = Build()
    graph = simple(net, net("Sigmoid", pair(net, net.input("x", 5), 0.1, zero)))
    assert ops(graph) == ["FakeQuantize", "Sigmoid"]
    assert graph.nodes[0].attrs == {"scale": float(np.float32(0.1)), "zero_point": point, "low": low, "high": high}
    assert graph.nodes[0].origin == ("quantizelinear0", "dequantizelinear1")


def test_what_two_pairs_round_differently_stays_two() -> None:
    net = Build()
    assert ops(simple(net, pair(net, pair(net, net.input("x", 5)), 0.3))) == ["FakeQuantize"] * 2


def test_what_is_dequantised_with_other_numbers_is_arithmetic() -> None:
    net = Build()
    step, other, zero = net.constant(np.float32(0.1)), net.constant(np.float32(0.2)), net.constant(np.uint8(100))
    graph = simple(net, net("DequantizeLinear", net("QuantizeLinear", net.input("x", 5), step, zero), other, zero))
    assert "FakeQuantize" not in ops(graph) and not any("Linear" in op for op in ops(graph))


def moved(net: Build, name: str, x: str) -> str:
    if name == "pool":
        return str(net("MaxPool", x, kernel_shape=(2, 2), strides=(2, 2)))
    if name == "pad":
        return str(net("Pad", x, pads=(0, 0, 1, 1, 0, 0, 1, 1)))
    return str(net("Transpose", x, perm=(0, 2, 3, 1)))


@pytest.mark.parametrize("name", ["pool", "pad", "transpose"])
def test_a_tensor_is_rounded_before_it_is_moved(name: str) -> None:
    net = Build()
    x = net("Sigmoid", net.input("x", 4, 6, 6))
    assert ops(simple(net, net("Sqrt", pair(net, moved(net, name, x)))))[:2] == ["Sigmoid", "FakeQuantize"]


@pytest.mark.parametrize("name", ["pool", "pad", "transpose"])
def test_what_was_rounded_before_it_was_moved_is_not_rounded_again(name: str) -> None:
    net = Build()
    x = pair(net, net("Sigmoid", net.input("x", 4, 6, 6)))
    assert ops(simple(net, net("Sqrt", pair(net, moved(net, name, x))))).count("FakeQuantize") == 1


def test_padding_by_another_number_than_zero_is_rounded_behind_it() -> None:
    net = Build()
    x = net("Pad", net("Sigmoid", net.input("x", 4, 6)), pads=(0, 0, 1, 0, 0, 1), value=0.33)
    assert ops(simple(net, net("Sqrt", pair(net, x)))) == ["Sigmoid", "Pad", "FakeQuantize", "Sqrt"]


def test_the_parts_of_a_joint_are_rounded_as_the_whole_is() -> None:
    net = Build()
    x = net.input("x", 4, 6)
    parts = [pair(net, net("Sigmoid", x), 0.01, np.uint8(0)), pair(net, net("Tanh", x), 0.02)]
    graph = simple(net, net("Sqrt", pair(net, net("Concat", *parts, axis=1), 0.03)))
    assert ops(graph).count("FakeQuantize") == 4 and ops(graph)[-2:] == ["Concat", "Sqrt"]


def test_a_view_of_what_others_read_too_is_rounded_alone() -> None:
    net = Build()
    x = net("Sigmoid", net.input("x", 4, 6))
    y = pair(net, net("Slice", x, axes=(1,), starts=(0,), ends=(2,), steps=(1,)))
    graph = simple(net, net("Sqrt", y), net("Exp", x))
    assert [op for op in ops(graph) if op in ("Slice", "FakeQuantize")] == ["Slice", "FakeQuantize"]


@pytest.mark.parametrize("bounds", [{"min": 0.0}, {"min": -0.33, "max": 0.57}], ids=["at zero", "between two steps"])
def test_a_pair_on_both_sides_of_a_clip_is_one_behind_it(bounds: dict[str, float]) -> None:
    net = Build()
    graph = simple(net, pair(net, net("Clip", pair(net, net.input("x", 5)), **bounds)))
    assert ops(graph) == ["Relu" if len(bounds) == 1 else "Clip", "FakeQuantize"]


def test_a_relu_goes_before_the_rounding() -> None:
    net = Build()
    assert ops(simple(net, net("Relu", pair(net, net.input("x", 5))))) == ["Relu", "FakeQuantize"]


def test_a_pool_of_integers_is_one_of_real_numbers() -> None:
    net = Build()
    step, zero = net.constant(np.float32(0.1)), net.constant(np.uint8(100))
    stored = net("QuantizeLinear", net.input("x", 4, 6, 6), step, zero)
    graph = simple(net, net("DequantizeLinear", moved(net, "pool", stored), step, zero))
    assert ops(graph) == ["FakeQuantize", "MaxPool"]


@pytest.mark.parametrize("scales", [1, 3])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_a_quantization_that_is_an_output_is_arithmetic(dtype: type, scales: int) -> None:
    net = Build()
    step = net.constant(np.array([0.1, 0.25, 0.031][:scales], np.float32))
    zero = net.constant(np.array([3, 100, 50][:scales], dtype))
    y = net("QuantizeLinear", net.input("x", 3, 5), step, zero, axis=1)
    graph = net.graph(y, net("DequantizeLinear", y, step, zero, axis=1))
    assert not any("Linear" in op for op in ops(keeps(simplify, graph)))


@pytest.mark.parametrize("zero", [np.uint8(0), np.int8(0)], ids=str)
def test_scales_of_channels_become_part_of_a_depthwise_convolutions_weights(zero: Any) -> None:
    net = Build()
    step, point = net.constant(np.array([0.1, 0.25, 0.03], np.float32)), net.constant(np.full(3, zero))
    stored = net("QuantizeLinear", net("Relu", net.input("x", 3, 5, 5)), step, point, axis=1)
    y = net.conv(net("DequantizeLinear", stored, step, point, axis=1), 6, 3, group=3)
    graph = simple(net, net("Sigmoid", y))
    assert ops(graph) == ["Relu", "Mul", "FakeQuantize", "Conv", "Sigmoid"]


def test_scales_of_channels_that_others_read_too_stay_a_product() -> None:
    net = Build()
    step, point = net.constant(np.array([0.1, 0.25, 0.03], np.float32)), net.constant(np.zeros(3, np.uint8))
    stored = net("QuantizeLinear", net("Relu", net.input("x", 3, 5, 5)), step, point, axis=1)
    x = net("DequantizeLinear", stored, step, point, axis=1)
    graph = simple(net, net("Sigmoid", net.conv(x, 3, 3, group=3)), net("Exp", x))
    assert ops(graph).count("Mul") == 2 and ops(graph).count("FakeQuantize") == 1


def bytes_before_a_layer(net: Build, integers: np.dtype[Any], weight: str) -> Graph:
    """Return a graph input of bytes that is dequantised and moved before a product."""
    stored = net("Cast", net("Relu", net.input("x", 6, 5)), to=integers.name)
    x = net("DequantizeLinear", stored, net.constant(np.float32(0.1)), net.constant(integers.type(7)))
    return simple(net, net("MatMul", net("Transpose", x, perm=(0, 2, 1)), weight))


@pytest.mark.parametrize("integers", ["uint8", "int8"])
def test_bytes_that_nothing_quantised_are_a_grid_to_a_quantised_layer(integers: str) -> None:
    net = Build()
    steps = net.random.integers(-127, 128, (6, 4)).astype(np.float32) * np.float32(0.01)
    graph = bytes_before_a_layer(net, np.dtype(integers), net.constant(steps))
    grids = [node.attrs for node in graph.nodes if node.op == "FakeQuantize"]
    point = 7 + 128 * (integers == "int8")
    assert grids == [{"scale": float(np.float32(0.1)), "zero_point": point, "low": 0, "high": 255}]


@pytest.mark.parametrize("weights", [np.random.default_rng(0).standard_normal((6, 4)), np.arange(6.0),
                                     [[np.nan, 1, -1, 2]] * 6], ids=["any", "a vector", "not a number"])
def test_bytes_that_nothing_quantised_are_numbers_to_a_layer_in_float(weights: Any) -> None:
    net = Build()
    graph = bytes_before_a_layer(net, np.dtype(np.uint8), net.constant(np.array(weights, np.float32)))
    assert "FakeQuantize" not in ops(graph)
