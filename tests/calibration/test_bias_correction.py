import numpy as np
import pytest

from infer_server.calibration.bias_correction import ChannelMeans
from infer_server.engines.ir.graph import Graph, Node, QParams, TensorType, type_of, verify
from infer_server.engines.ops.reference import run_node
from infer_server.engines.passes.quantization.bias_correction import bias_shift, correct_biases, corrected_bias

FLOAT = np.dtype(np.float32)
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((6, 4, 1, 1)).astype(np.float32)
BIAS = RNG.standard_normal(6).astype(np.float32)
ITEMS = np.maximum(RNG.standard_normal((8, 5, 5, 4)) + [0, 1, 2, 3], 0).astype(np.float32)      # NHWC, unequal means


def network(bias="b", **attrs):
    """Return the graph y = relu(Conv1x1(x, w, b)), one Fused node, channels last."""
    conv = Node("Conv", ("x", "w") + ((bias,) if bias else ()), ("t",), {"channels_last": 1, **attrs})
    fused = Node("Fused", conv.inputs, ("y",), name="fused", body=(conv, Node("Relu", ("t",), ("y",))))
    constants = {"w": WEIGHT, **({"b": BIAS} if bias else {})}
    types = {name: TensorType(FLOAT, ("batch", 5, 5, c)) for name, c in (("x", 4), ("t", 6), ("y", 6))}
    return Graph("g", ("x",), ("y",), (fused,), constants, {**types, **{n: type_of(c) for n, c in constants.items()}})


def quantised(graph, levels=7):
    """Return the graph with int8 weights of few levels, so that rounding errors are large, and the rounded weights."""
    scale = np.abs(WEIGHT).max(axis=(1, 2, 3)) / levels
    stored = np.rint(WEIGHT / scale[:, None, None, None]).astype(np.int8)
    quant = QParams(tuple(scale.tolist()), (0,) * 6, "int8", axis=0)
    return graph.rebuild(graph.nodes, {"w": stored}, {"w": type_of(stored, quant)}), stored * scale[:, None, None, None]


def conv(weight, bias):
    return ITEMS @ weight[:, :, 0, 0].T + bias


def means_of_items():
    means = ChannelMeans(["x"])
    for items in (ITEMS[:3], ITEMS[3:]):
        means.observe("x", items)
    return means.result()


def test_means_are_over_all_items_and_places_whatever_the_batches():
    np.testing.assert_allclose(means_of_items()["x"], ITEMS.mean(axis=(0, 1, 2)), rtol=1e-6)


@pytest.mark.parametrize("bias", ["b", ""])
def test_the_mean_of_every_output_channel_is_that_of_the_float_weights(bias):
    graph = network(bias=bias)
    low, rounded = quantised(graph)
    correction = correct_biases(graph, low, means_of_items())
    assert correction.corrected == ("y",)
    fixed = verify(correction.graph)
    anchor = fixed.nodes[0].anchor
    expected = conv(WEIGHT, BIAS if bias else 0).mean(axis=(0, 1, 2))
    before = conv(rounded, BIAS if bias else 0).mean(axis=(0, 1, 2))
    after = conv(rounded, fixed.constants[anchor.inputs[2]]).mean(axis=(0, 1, 2))
    np.testing.assert_allclose(after, expected, atol=1e-5)
    assert np.abs(before - expected).max() > 0.05       # there was something to correct
    np.testing.assert_array_equal(fixed.constants["w"], WEIGHT)


@pytest.mark.parametrize("strides, pads, size", [((1, 1), (2, 2, 2, 2), (3, 9)), ((2, 1), (1, 0, 0, 1), (2, 5))])
def test_taps_on_padding_count_as_often_as_they_read_pixels(strides, pads, size):
    """The items are constant images, for which the correction is exact."""
    weight = RNG.standard_normal((6, 4, 5, 5) if pads[0] == 2 else (6, 4, 3, 2)).astype(np.float32)
    attrs = {"channels_last": 1, "kernel_shape": weight.shape[2:], "strides": strides, "pads": pads}
    node = Node("Conv", ("x", "w"), ("y",), attrs)
    items = np.broadcast_to(np.float32([1, 2, 3, 4]), (1, *size, 4))
    y, = run_node(node, [items, weight])
    types = {"x": TensorType(FLOAT, ("batch", *size, 4)), "y": TensorType(FLOAT, ("batch", *y.shape[1:]))}
    graph = verify(Graph("g", ("x",), ("y",), (node,), {"w": weight}, {**types, "w": type_of(weight)}))
    rounded = np.rint(weight * 2) / 2
    bias = corrected_bias(graph, node, rounded, np.arange(1.0, 5.0))
    off, = run_node(node, [items, rounded.astype(np.float32)])
    np.testing.assert_allclose((off + bias).mean(axis=(0, 1, 2)), y.mean(axis=(0, 1, 2)), atol=1e-4)


def test_a_group_sees_the_means_of_its_own_inputs():
    weight, rounded = RNG.standard_normal((2, 4, 3, 3, 3))     # 4 outputs, 2 groups of 3 inputs
    mean = RNG.standard_normal(6)
    expected = [((rounded - weight)[o].sum(axis=(1, 2)) * mean[3 * (o // 2):3 * (o // 2) + 3]).sum() for o in range(4)]
    np.testing.assert_allclose(bias_shift(weight, rounded, mean, groups=2), expected)


@pytest.mark.parametrize("trans_b", [0, 1])
def test_a_gemm_is_corrected_in_either_orientation(trans_b):
    weight = WEIGHT[:, :, 0, 0] if trans_b else np.ascontiguousarray(WEIGHT[:, :, 0, 0].T)
    stored = np.rint(weight * 3).astype(np.int8)
    types = {"x": TensorType(FLOAT, ("batch", 4)), "y": TensorType(FLOAT, ("batch", 6))}
    graph = Graph("g", ("x",), ("y",), (Node("Gemm", ("x", "w", "b"), ("y",), {"transB": trans_b}),),
                  {"w": weight, "b": BIAS}, {**types, "w": type_of(weight), "b": type_of(BIAS)})
    low = graph.rebuild(graph.nodes, {"w": stored}, {"w": type_of(stored, QParams((1 / 3,), (0,), "int8"))})
    mean = np.float32([1, 2, 3, 4])
    fixed = verify(correct_biases(graph, low, {"x": mean}).graph)
    difference = (stored / 3 - weight) if trans_b else (stored / 3 - weight).T
    np.testing.assert_allclose(fixed.constants[fixed.nodes[0].inputs[2]], BIAS - difference @ mean, rtol=1e-5)


def test_what_stays_in_float_or_has_no_mean_or_lies_otherwise_is_left_alone():
    graph = network()
    low, _ = quantised(graph)
    assert correct_biases(graph, graph, means_of_items()).corrected == ()
    assert correct_biases(graph, low, {}).corrected == ()
    planar = network(channels_last=0)
    assert correct_biases(planar, quantised(planar)[0], means_of_items()).corrected == ()
