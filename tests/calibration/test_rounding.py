"""Rounding of weights by the error of their layers."""
import numpy as np
import pytest
from onnx import parser

from infer_server.calibration import Calibration, rounding
from infer_server.calibration.rounding import SecondMoments, rounded, roundings
from infer_server.calibration.table import read_table
from infer_server.engines import build_engine, load_engine
from infer_server.engines.ir.graph import Graph, Node, TensorType, type_of, verify
from infer_server.engines.ir.recipe import packed_steps, unpacked_steps
from infer_server.engines.ops.reference import run_node
from infer_server.engines.passes.quantization.quantize import quantize, weight_params, with_rounding

FLOAT = np.dtype(np.float32)
RNG = np.random.default_rng(0)


def correlated(rows, width):
    """Return rows whose columns are alike, as neighbouring pixels are."""
    return (RNG.standard_normal((rows, 1)) + 0.2 * RNG.standard_normal((rows, width))).astype(np.float32)


def convolution(groups):
    """Return the graph of a channels-last 3x3 convolution of stride 2 with padding, 4 channels, and its weights."""
    weight = RNG.standard_normal((4, 4 // groups, 3, 3)).astype(np.float32)
    attrs = {"channels_last": 1, "group": groups, "kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    node = Node("Conv", ("x", "w"), ("y",), attrs, name="y")
    types = {"x": TensorType(FLOAT, ("batch", 9, 9, 4)), "y": TensorType(FLOAT, ("batch", 5, 5, 4))}
    return verify(Graph("g", ("x",), ("y",), (node,), {"w": weight}, {**types, "w": type_of(weight)})), weight


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_output_errors_fall_below_those_of_the_nearest_integers(groups):
    x = np.stack([correlated(200, 16) for _ in range(groups)])
    hessian = (x.transpose(0, 2, 1) @ x / 200).astype(np.float64)
    weight = RNG.standard_normal((groups, 12, 16))
    weight *= 127 / np.abs(weight).max(axis=2, keepdims=True)
    found = rounded(weight, hessian)
    error, nearest = (np.square(x @ (w - weight).transpose(0, 2, 1)).mean() for w in (found, np.rint(weight)))
    assert error < nearest / 4
    assert (found == np.rint(found)).all() and (np.abs(found).max(axis=2) == 127).all()


def test_uncorrelated_inputs_leave_the_nearest_integers():
    weight = RNG.standard_normal((1, 5, 8))
    weight *= 127 / np.abs(weight).max(axis=2, keepdims=True)
    np.testing.assert_array_equal(rounded(weight, np.eye(8)[None]), np.rint(weight))
    np.testing.assert_array_equal(rounded(weight, np.zeros((1, 8, 8))), np.rint(weight))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_second_moments_are_those_of_what_a_convolution_reads(groups):
    graph, weight = convolution(groups)
    items = RNG.standard_normal((12, 9, 9, 4)).astype(np.float32)
    moments = SecondMoments(graph)
    moments.observe("x", (item[None] for item in items))
    hessian = moments.of("y", False)
    y, = run_node(graph.nodes[0], [items, weight])
    rows = weight.reshape(groups, 4 // groups, -1).astype(np.float64)
    power = np.einsum("gok,gkl,gol->go", rows, hessian, rows).reshape(-1)
    np.testing.assert_allclose(power, np.square(y.astype(np.float64)).mean(axis=(0, 1, 2)), rtol=1e-4)


def test_layers_with_few_rows_are_rounded_to_the_nearest():
    graph, _ = convolution(1)
    moments = SecondMoments(graph)
    moments.observe("x", correlated(2, 9 * 9 * 4).reshape(2, 1, 9, 9, 4))
    assert moments.of("y", False) is None       # 50 rows of 36 inputs
    assert roundings(graph, moments, {}, False, lambda *_: None) == {}


@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_layers_whose_squares_overflow_are_rounded_to_the_nearest():
    graph, _ = convolution(1)
    moments = SecondMoments(graph)
    moments.observe("x", 1e25 * correlated(12, 9 * 9 * 4).reshape(12, 1, 9, 9, 4))
    assert roundings(graph, moments, {}, False, lambda *_: None) == {}


def test_layers_beyond_the_limit_of_memory_are_rounded_to_the_nearest(monkeypatch):
    graph, _ = convolution(1)
    items = correlated(12, 9 * 9 * 4).reshape(12, 1, 9, 9, 4)
    needed = 36 * (36 * 8 + 256 * 4)       # H, and twice 128 rows
    for limit, count in ((needed, 1), (needed - 1, 0)):
        monkeypatch.setattr(rounding, "MOST_BYTES", limit)
        moments = SecondMoments(graph)
        moments.observe("x", items)
        assert len(roundings(graph, moments, {}, False, lambda *_: None)) == count


@pytest.mark.parametrize("groups", [1, 4])
def test_quantising_the_rounded_weights_gives_the_integers_that_were_chosen(groups):
    graph, weight = convolution(groups)
    items = correlated(12, 9 * 9 * 4).reshape(12, 9, 9, 4)
    moments = SecondMoments(graph)
    moments.observe("x", (item[None] for item in items))
    steps = roundings(graph, moments, {}, False, lambda *_: None)
    chosen = unpacked_steps(steps["y"], weight.shape)
    assert np.abs(chosen).max() >= 1
    fixed = verify(with_rounding(graph, steps, {}))
    low = quantize(fixed, {"x": (-4.0, 4.0)})
    stored = next(array for array in low.constants.values() if array.dtype == np.int8)
    scale = np.array(weight_params(weight, 0).scale, np.float32)[:, None, None, None]
    np.testing.assert_array_equal(stored, np.rint(weight / scale) + chosen)


def test_steps_of_another_shape_are_ignored():
    graph, weight = convolution(1)
    other = with_rounding(graph, {"y": packed_steps(np.ones((1, 4), np.int8))}, {})
    np.testing.assert_array_equal(other.constants[other.nodes[0].inputs[1]], weight)


def test_a_plan_with_open_extents_keeps_the_rounding(tmp_path):
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, T, 16] x) => (float[N, T, 8] y) '
        f"<float[16, 8] w = {{{', '.join(f'{value:.4f}' for value in RNG.standard_normal(128))}}}> "
        "{ a = MatMul(x, w) y = Relu(a) }")
    feeds = [{"x": correlated(20, 16)[None]} for _ in range(8)]
    build = build_engine(model, precision="int8", timing=False, cache=False, calibration=Calibration(feeds))
    build.save(tmp_path / "m.plan")
    y = load_engine(tmp_path / "m.plan").run({"x": feeds[0]["x"][:, :5]})["y"]
    np.testing.assert_array_equal(y, build.engine().run(feeds[0])["y"][:, :5])


def test_the_cache_holds_the_rounding_of_a_build(tmp_path):
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3, 8, 8] x) => (float[N, 4, 8, 8] y) '
        f"<float[4, 3, 3, 3] w = {{{', '.join(f'{value:.4f}' for value in RNG.standard_normal(108))}}}> "
        "{ a = Conv<pads = [1, 1, 1, 1]>(x, w) y = Relu(a) }")
    feeds = [{"x": correlated(64, 3).T.reshape(1, 3, 8, 8)} for _ in range(8)]
    cache = tmp_path / "ranges.json"
    options = {"precision": "int8", "timing": False, "cache": False}
    first = build_engine(model, calibration=Calibration(feeds, cache=cache), **options)
    assert any(unpacked_steps(steps, (4, 3, 3, 3)).any() for steps in read_table(cache).rounding.values())
    again = build_engine(model, calibration=Calibration(cache=cache), **options)
    np.testing.assert_array_equal(first.engine().run(feeds[0])["y"], again.engine().run(feeds[0])["y"])
