"""INT8 products whose input has a scale for each row, computed at run time."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from infer_server.calibration import Calibration
from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.calibration.table import read_table
from infer_server.cli.inspect_engine import layers
from infer_server.engines import build_engine, load_engine
from infer_server.engines.compiler.build import EngineBuild
from infer_server.engines.compiler.ranges import Calibrated
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir.graph import Array, Graph, verify
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.lowering.buffers import buffers_of
from infer_server.engines.lowering.calls import scaled_rows
from infer_server.engines.lowering.lower import lower
from infer_server.engines.lowering.problems.convolution import Contraction, ScaledContraction
from infer_server.engines.lowering.problems.nest import Nest
from infer_server.engines.lowering.problems.rows import Norm, ScaledNorm
from infer_server.engines.ops import op_of
from infer_server.engines.ops.reference import run
from infer_server.engines.passes.pipeline import optimise, simplify
from infer_server.engines.passes.quantization.quantize import edges_to_calibrate, quantize
from infer_server.engines.passes.quantization.recipe import prepared
from infer_server.engines.passes.quantization.scaled_rows import LEAST, scalable_rows, with_scaled_rows
from infer_server.engines.passes.quantization.smoothing import smoothed
from infer_server.engines.plan.plan import graph_of
from tests.engines.compiler.small_models import node, small_model
from tests.engines.passes.build import check_types

WIDTH, HIDDEN = 24, 40
ROWS = ("n", "h", "m")


def model(*leading: Any, activation: str = "Gelu") -> onnx.ModelProto:
    """Return the model n = norm(x); h = gelu(n A + a); m = norm(h B + b + n); y = m C, with an outlier channel in n."""
    random = np.random.default_rng(0)
    constants = {"A": (WIDTH, HIDDEN), "B": (HIDDEN, WIDTH), "C": (WIDTH, 10), "a": (HIDDEN,), "b": (WIDTH,),
                 "shift": (WIDTH,)}
    weights = {name: random.standard_normal(shape) / np.sqrt(shape[0]) for name, shape in constants.items()}
    weights["g"] = np.where(np.arange(WIDTH) == 3, 20.0, 1.0)
    nodes = [node("LayerNormalization", "x g shift", "n"), node("MatMul", "n A", "p"), node("Add", "p a", "q"),
             node(activation, "q", "h"), node("MatMul", "h B", "r"), node("Add", "r b", "s"), node("Add", "s n", "t"),
             node("LayerNormalization", "t g shift", "m"), node("MatMul", "m C", "y")]
    for one in nodes:
        one.name = one.output[0]
    return small_model(nodes, {"x": [*leading, WIDTH]}, ["y"], {
        name: array.astype(np.float32) for name, array in weights.items()}, opset=20)


def items(*leading: int, seed: int = 0) -> dict[str, Array]:
    """Return rows half of which have an outlier in the channel that the norm enlarges."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((*leading, WIDTH)).astype(np.float32)
    x[..., 3] *= np.where(random.random(leading) < 0.5, 5, 0)
    return {"x": x}


def float_graph(source: onnx.ModelProto) -> Graph:
    return optimise(simplify(graph_from_onnx(source)))


def ranges_of(graph: Graph, feeds: dict[str, Array]) -> dict[str, tuple[float, float]]:
    names = edges_to_calibrate(graph)
    seen = run(graph, feeds, names)
    return {name: (float(seen[name].min()), float(seen[name].max())) for name in names}


@dataclass(frozen=True)
class Rows:
    """Source of a recipe with scaled rows: calibration without a compiler."""
    recipe: Recipe
    cache: str = ""

    def first(self, inputs: Any, pixels: bool) -> None:
        return None

    def calibrate(self, subject: Any, notify: Any, progress: Any) -> Calibrated:
        return Calibrated(self.recipe, {})


def built(source: onnx.ModelProto, feeds: dict[str, Array], **options: Any) -> EngineBuild:
    """Build with the ranges of these items, whose shape stands for open lengths."""
    recipe = Recipe(ranges_of(float_graph(model("N", *feeds["x"].shape[1:-1])), feeds), scaled_rows=ROWS)
    return build_engine(source, precision="int8", timing=False, cache=False, calibration=Rows(recipe), **options)


# ---- the graph
@pytest.mark.parametrize("activation, least", [("Relu", 0), ("Gelu", -0.1701), ("HardSwish", -0.375), ("Tanh", None)])
@pytest.mark.parametrize("leading", [("N", 5), ("N",), (7,)], ids=str)
def test_a_graph_with_scaled_rows_computes_the_same(leading, activation, least):
    graph = float_graph(model(*leading, activation=activation))
    assert scalable_rows(graph) == (("n", "m") if least is None else ROWS)
    after = verify(with_scaled_rows(graph, ROWS))
    check_types(after)
    feeds = items(*(7 if extent in ("N", 7) else extent for extent in leading))
    shown = run(after, feeds, ["y", "h.scaled"])
    # The float weights of the product differ by half a step from those that its constant makes up for.
    np.testing.assert_allclose(shown["y"], run(graph, feeds)["y"], 1e-4, 1e-4 if not least else 2e-2)
    assert shown["h.scaled"].max() <= 255.01 and (least is None or shown["h.scaled"].min() >= 0)
    first = next(one for one in after.nodes if one.outputs[0] in ("h", "h.shifted"))
    assert [part.op for part in first.body] == [
        graph.producer["h"].anchor.op, "Mul", "Add", activation, *["Add"] * bool(least)]


def test_the_bounds_of_activations_are_below_their_minima():
    x = np.linspace(-9, 9, 1 << 16)
    for op, least in LEAST.items():
        for attrs in ({}, {"approximate": "tanh"}) if op == "Gelu" else ({},):
            minimum = op_of(op).formula(x, **attrs).min()
            assert least <= minimum < least + 1e-3, op


def test_numbers_of_a_product_of_shifted_rows_are_exact():
    """Weights on the grid of int8 and rows of whole steps leave no error but that of float32."""
    random = np.random.default_rng(0)
    weights = random.integers(-126, 127, (HIDDEN, WIDTH)).astype(np.float32)
    weights[0] = 127
    source = small_model([node("Gelu", "x", "h"), node("MatMul", "h B", "y")], {"x": ["N", HIDDEN]}, ["y"],
                         {"B": weights}, opset=20)
    graph, feeds = float_graph(source), {"x": random.standard_normal((64, HIDDEN)).astype(np.float32)}
    assert scalable_rows(graph) == ("h",)
    after = with_scaled_rows(graph, ["h"])
    np.testing.assert_allclose(run(after, feeds)["y"], run(graph, feeds)["y"], 1e-4, 1e-2)
    quantised = run(quantize(after, {}), feeds)["y"]
    assert sqnr_db(run(graph, feeds)["y"], quantised) > 45      # 255 steps; 127 have 6 dB less


def test_smoothed_activations_are_shifted_channel_by_channel():
    graph = float_graph(model("N", 5))
    factors = np.linspace(0.5, 2, HIDDEN)
    smooth = smoothed(graph, {"h": factors})
    after = with_scaled_rows(smooth, ["h"])
    np.testing.assert_allclose(after.constants["h.shift"], 0.1701 / factors, rtol=1e-6)
    shown = run(after, items(7, 5), ["y", "h.scaled"])
    assert shown["h.scaled"].min() >= 0
    np.testing.assert_allclose(shown["y"], run(graph, items(7, 5))["y"], 1e-4, 2e-2)


def test_activations_that_others_read_are_not_shifted():
    source = model("N", 5)
    source.graph.output.append(onnx.helper.make_empty_tensor_value_info("h"))
    after = with_scaled_rows(float_graph(source), ROWS)
    assert {one.outputs[0]: one.attrs.get("steps") for one in after.nodes if one.op == "ScaledRows"} == {
        "n.scaled": None, "h.scaled": None, "m.scaled": None}
    feeds = items(7, 5)
    np.testing.assert_allclose(run(after, feeds)["h"], run(float_graph(source), feeds)["h"], 1e-5, 1e-5)


def test_a_tensor_is_scaled_once_for_all_its_products_and_kept_nodes_read_it_unscaled():
    graph = float_graph(model("N", 5))
    after = with_scaled_rows(graph, [*ROWS, "of other shapes"], keep_float=["p"])
    assert [one.inputs[0] for one in after.nodes if one.op == "ScaledRows"] == ["h.shifted", "m"]
    assert after.producer["h.shifted"].anchor.inputs[0] == "n"


def test_scaled_rows_are_bytes_and_what_they_are_computed_from_is_float():
    graph, feeds = float_graph(model("N", 5)), items(8, 5)
    low = quantize(with_scaled_rows(graph, ROWS), ranges_of(graph, feeds))
    for name in ROWS:
        scaled = next(one for one in low.nodes if one.op == "ScaledRows" and one.outputs[0] == f"{name}.scaled")
        rows, scales = (low.types[output] for output in scaled.outputs)
        middle = 0 if name == "h" else 128
        assert (rows.quant.scale, rows.quant.zero_point, rows.quant.dtype) == ((1.0,), (middle,), "uint8")
        assert scales.quant is None and scales.shape == ("batch", 5, 1) and low.types[scaled.inputs[0]].quant is None
        assert all(reader.precision == "int8" for reader in low.consumers[scaled.outputs[0]])


def test_rows_of_small_numbers_keep_their_steps():
    graph, feeds = float_graph(model("N", 5)), items(64, 5, seed=1)
    expected, ranges = run(graph, feeds)["y"], ranges_of(graph, items(64, 5))
    small = np.abs(feeds["x"][..., 3]) < 1e-6
    before, after = (run(quantize(prepared(graph, Recipe(ranges, scaled_rows=rows)), ranges), feeds)["y"]
                     for rows in ((), ROWS))
    assert sqnr_db(expected[small], after[small]) > sqnr_db(expected[small], before[small]) + 6


# ---- engines
@pytest.mark.parametrize("leading", [("N", 5), ("N",), (7,)], ids=str)
@pytest.mark.parametrize("target", ["", "portable", "numpy"])
def test_an_engine_computes_what_the_reference_does(target, leading):
    source, shape = model(*leading), [7 if extent in ("N", 7) else extent for extent in leading]
    feeds = items(*shape, seed=1)
    build = built(source, items(*shape), target=target)
    graph = float_graph(source)
    ranges = ranges_of(graph, items(*shape))
    expected = run(quantize(prepared(graph, Recipe(ranges, scaled_rows=ROWS)), ranges), feeds)["y"]
    y = build.engine().run(feeds)["y"]
    assert target == "numpy" or not build.coverage.by_reference
    assert sqnr_db(expected, y) > 45, sqnr_db(expected, y)      # other orders of sums move a few integers by 1
    assert sqnr_db(run(graph, feeds)["y"], y) > 30


def test_layers_that_are_kept_in_bfloat16_read_unscaled_rows():
    feeds, source = items(4, 5, seed=1), model("N", 5)
    build = built(source, items(4, 5), keep_float=("p",), float_type="bf16")
    assert layers(build.plan).count("scaled_norm") == 1
    assert sqnr_db(run(float_graph(source), feeds)["y"], build.engine().run(feeds)["y"]) > 30


def test_items_of_a_batch_do_not_change_each_other():
    feeds = items(6, 5, seed=1)
    engine = built(model("N", 5), items(6, 5), max_batch=4).engine()
    together = engine.run(feeds)["y"]
    for i in range(6):
        np.testing.assert_array_equal(engine.run({"x": feeds["x"][i:i + 1]})["y"], together[i:i + 1])


def test_open_lengths_and_a_plan_file(tmp_path):
    feeds = items(1, 9, seed=1)
    build = built(model("N", "T"), items(1, 9))
    build.save(tmp_path / "m.plan")
    engine = load_engine(tmp_path / "m.plan")
    whole = engine.run(feeds)["y"]
    for length in (1, 4, 9):
        np.testing.assert_array_equal(engine.run({"x": feeds["x"][:, :length]})["y"], whole[:, :length])


def test_a_row_of_zeros_is_exact_and_a_row_that_is_not_finite_stays_alone():
    engine = built(model("N", 5), items(4, 5)).engine()
    feeds = items(1, 5, seed=1)
    clean = engine.run(feeds)["y"]
    for value in (np.nan, np.inf):
        feeds["x"][0, 2, 7] = value
        y = engine.run(feeds)["y"]
        assert not np.isfinite(y[0, 2]).any()
        np.testing.assert_array_equal(np.delete(y, 2, 1), np.delete(clean, 2, 1))


def test_rows_that_only_products_read_stay_in_scratch_memory(monkeypatch):
    """A byte of the result needs no more than the approximation of the activation for bytes."""
    def hidden(source):
        graph = float_graph(source)
        lowered = lower(quantize(with_scaled_rows(graph, ROWS), ranges_of(graph, items(8, 5))), 4)
        name = "h.shifted" if "h" not in graph.outputs else "h"
        size, = (buffer.bytes for buffer in buffers_of(lowered, 4) if buffer.name == name)
        problem, = (call.problem for call in lowered.compiled if isinstance(call.problem, ScaledContraction))
        return problem.writes_y, "gelu_u8" in str(problem.program), size

    watched = model("N", 5)
    watched.graph.output.append(onnx.helper.make_empty_tensor_value_info("h"))
    assert hidden(model("N", 5)) == (False, True, 0)
    assert hidden(watched)[:2] == (True, False)
    monkeypatch.setattr(scaled_rows, "WIDEST", 4 * HIDDEN - 1)
    assert hidden(model("N", 5))[:2] == (True, True)
    assert hidden(model("N", 5))[2] >= 4 * 5 * 4 * HIDDEN


def test_a_backend_without_the_kernel_computes_the_rows_by_nests():
    graph = float_graph(model("N", 5))
    low = quantize(with_scaled_rows(graph, ROWS), ranges_of(graph, items(8, 5)))
    calls = [call.problem for call in lower(low, 4).compiled]
    problem, _ = (one.scaled for one in calls if isinstance(one, ScaledNorm))
    lowered = lower(low, 4, solved={*map(type, calls), Norm, Contraction, Nest} - {ScaledNorm, ScaledContraction})
    assert len(lowered.calls) == len(lowered.compiled)
    scales, rows, *others = (call.problem for call in lowered.compiled if call.node.op == "ScaledRows")
    x = items(3, 5)["x"]
    x[0, 0], x[1, 1, 3], x[2, 2, 4] = 0, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        expected, expected_scales = problem.reference([x], {})
        (found,), (found_scales,) = rows.reference([x], {}), scales.reference([x], {})
    np.testing.assert_array_equal(found_scales, expected_scales[..., 0])
    finite = np.isfinite(expected_scales[..., 0])
    assert finite.sum() == 13
    np.testing.assert_array_equal(found[finite], expected[finite])
    problem, = (one.scaled for one in calls if isinstance(one, ScaledContraction))
    x = np.abs(np.random.default_rng(0).standard_normal((3, 5, HIDDEN), np.float32))
    numbers, row_scales = problem.reference([x[:, None]], {})
    np.testing.assert_array_equal(others[0].reference([x], {})[0], row_scales[:, 0, :, 0])
    np.testing.assert_array_equal(others[1].reference([x], {})[0], numbers[:, 0])


def test_the_exported_model_computes_the_same():
    """Run without ONNX Runtime's optimisations: its products of bytes saturate sums of two on CPUs without VNNI."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    feeds = items(4, 5, seed=1)
    build = built(model("N", 5), items(8, 5))
    proto = onnx_from_graph(graph_of(build.plan))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert sqnr_db(build.engine().run(feeds)["y"], session.run(["y"], feeds)[0]) > 45
    assert layers(build.plan).count("scaled_norm") == 2


# ---- calibration
def test_the_search_keeps_scaled_rows_that_lower_the_error(tmp_path):
    feeds = [items(1, 5, seed=seed) for seed in range(16)]
    source, cache = model("N", 5), tmp_path / "ranges.json"
    options = {"precision": "int8", "timing": False, "cache": False}
    build = build_engine(source, calibration=Calibration(feeds, cache=cache), **options)
    trials = {one["trial"]: one for one in build.plan.metadata["search"] if one["stage"] == "scaled rows"}
    assert trials["with"]["kept"] and trials["with"]["sqnr_db"] > trials["without"]["sqnr_db"]
    assert build.plan.metadata["tensors_scaled_by_row"] == 3 and read_table(cache).scaled_rows == ROWS
    assert not any(one["stage"] == "range" and one["trial"].startswith(("n:", "m:"))
                   for one in build.plan.metadata["search"])
    again = build_engine(source, calibration=Calibration(cache=cache), **options)
    np.testing.assert_array_equal(again.engine().run(feeds[0])["y"], build.engine().run(feeds[0])["y"])
