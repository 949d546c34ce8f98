"""compare-engine: outputs and layers of plans and ONNX files, what is named, what is refused, exit statuses."""
from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from infer_server import build_engine
from infer_server.calibration import Calibration
from infer_server.comparing import cli
from infer_server.comparing import comparison as comparing
from infer_server.comparing.comparison import Comparison, compare
from infer_server.comparing.errors import ErrorSums
from infer_server.comparing.sides import PlanSide
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import ConfigError, InputError
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.passes.quantization.smoothing import smoothable, smoothed
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.engines.plan.plan import graph_of
from tests.engines.compiler.program_models import chosen_rows

# As many channels as rows and columns: layouts of images differ in no shape.
NETWORK = """<ir_version: 8, opset_import: ["": 17]>
    m (float[N,3,8,8] x) => (float[N,5] y)
    { a = Conv<pads=[1,1,1,1]>(x, w1) b = Relu(a) c = Conv<pads=[1,1,1,1]>(b, w2) d = Relu(c)
      s = Conv<pads=[1,1,1,1]>(d, w3) t = Relu(s) p = GlobalAveragePool(t) f = Flatten(p) y = Gemm(f, w4) }"""
WEIGHTS = {"w1": (8, 3, 3, 3), "w2": (8, 8, 3, 3), "w3": (8, 8, 3, 3), "w4": (8, 5)}


def network(scales: Mapping[str, float] = {}) -> onnx.ModelProto:      # noqa: B006
    """Return three convolutions and a product. scales: factors of weights."""
    random = np.random.default_rng(0)
    model = onnx.parser.parse_model(NETWORK)
    for name, shape in WEIGHTS.items():
        array = (0.3 * random.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array * np.float32(scales.get(name, 1)), name))
    return model


def items(count: int = 8) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with m.onnx, fp32.plan, int8.plan, of one network, and clipped.plan with a bad range."""
    folder = tmp_path_factory.mktemp("compared")
    onnx.save(network(), folder / "m.onnx")
    np.save(folder / "items.npy", items())
    options: dict[str, Any] = {"timing": False, "cache": False, "max_batch": 4}
    build_engine(folder / "m.onnx", **options).save(folder / "fp32.plan")
    ranges = folder / "ranges.json"
    int8 = {**options, "precision": "int8"}
    build_engine(folder / "m.onnx", calibration=Calibration(str(folder / "items.npy"), "minmax", ranges),
                 **int8).save(folder / "int8.plan")
    table = json.loads(ranges.read_text())
    table["ranges"]["d"] = [value / 50 for value in table["ranges"]["d"]]
    ranges.write_text(json.dumps(table))
    build_engine(folder / "m.onnx", calibration=Calibration(cache=ranges), **int8).save(folder / "clipped.plan")
    return folder


def worst(found: Comparison) -> str:
    return min(found.layers, key=lambda errors: errors.sqnr_db).name


# ---- layers
@pytest.mark.parametrize("b", ["m.onnx", "fp32.plan"])
def test_the_layer_with_a_bad_range_is_named(folder: Path, b: str) -> None:
    good, bad = (compare(folder / a, folder / b, str(folder / "items.npy")) for a in ("int8.plan", "clipped.plan"))
    assert good.first_divergent == "" and good.min_sqnr_db > comparing.THRESHOLD_DB
    assert bad.first_divergent == worst(bad) == "d"
    assert [errors.name for errors in bad.layers if errors.name != "x.nhwc"] == ["b", "d", "t", "p"]
    assert "diverges first: d" in str(bad) and "d " in bad.text(1)


def test_a_float_plan_has_the_layers_of_the_model_in_any_layout(folder: Path) -> None:
    actual = compare(folder / "fp32.plan", folder / "m.onnx")
    assert min(errors.sqnr_db for errors in (*actual.layers, *actual.outputs)) > 100
    assert actual.skipped == {"only in A": 1, "only in B": 3, "reshaped or transposed": 1, "of another shape": 0,
                              "not of floats or not shown": 0}


def test_equal_plans_have_no_errors(folder: Path) -> None:
    actual = compare(folder / "int8.plan", folder / "int8.plan")
    assert {errors.sqnr_db for errors in (*actual.layers, *actual.outputs)} == {math.inf}
    assert {errors.largest for errors in actual.layers} == {0.0} and actual.first_divergent == ""
    assert "the inputs are generated" in str(actual)


def test_tensors_over_the_limit_are_compared_in_several_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, passes = compare(folder / "int8.plan", folder / "fp32.plan"), list[int]()
    monkeypatch.setattr(comparing, "MAX_BYTES", 3000)
    cut = compare(folder / "int8.plan", folder / "fp32.plan",
                  progress=lambda feeds, count: (passes.append(count), feeds)[1])
    assert (cut.layers, cut.outputs, cut.items) == (whole.layers, whole.outputs, whole.items) and len(passes) > 2


def test_onnx_files_run_without_onnx_runtime(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(network({"w2": 1.5}), tmp_path / "other.onnx")
    by_runtime = compare(tmp_path / "other.onnx", folder / "m.onnx", items=2)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    actual = compare(tmp_path / "other.onnx", folder / "m.onnx", items=2)
    assert "NumPy" in actual.a and "ONNX Runtime" in by_runtime.a
    for one in (actual, by_runtime):
        assert [errors.sqnr_db == math.inf for errors in one.layers] == [True, True, *[False] * 5]
        assert one.first_divergent == "c"


def test_the_quantised_model_of_a_plan_is_compared_with_the_float_model(folder: Path, tmp_path: Path) -> None:
    onnx.save(onnx_from_graph(graph_of(read_plan(folder / "clipped.plan"))), tmp_path / "qdq.onnx")
    actual = compare(tmp_path / "qdq.onnx", folder / "m.onnx", str(folder / "items.npy"))
    assert actual.first_divergent in ("d", "s") and actual.min_sqnr_db < 20


def test_a_smoothed_tensor_is_not_compared(tmp_path: Path) -> None:
    """SmoothQuant divides it, so that it differs from the float model's by more than rounding."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 20]> m (float[N,4,8] x) => (float[N,4,8] y)
        { h = LayerNormalization(x, g, b) k = MatMul(h, w) r = Gelu(k) y = MatMul(r, v) }""")
    random = np.random.default_rng(0)
    for name, shape in {"g": 8, "b": 8, "w": (8, 8), "v": (8, 8)}.items():
        array = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    builder = Builder(BuildConfig(timing=False))
    graph = builder.graph(model)
    write_plan(builder.plan(graph), tmp_path / "plain.plan")
    names = smoothable(graph)
    write_plan(builder.plan(smoothed(graph, {name: np.arange(1, 9) for name in names})), tmp_path / "smooth.plan")
    assert names and {*names} <= PlanSide(tmp_path / "plain.plan").tensors.keys()
    assert not {*names} & PlanSide(tmp_path / "smooth.plan").tensors.keys()
    actual = compare(tmp_path / "smooth.plan", tmp_path / "plain.plan")
    assert actual.first_divergent == "" and actual.min_sqnr_db > 100


# ---- what has no layers
def test_a_stripped_plan_and_a_program_have_a_table_of_outputs(folder: Path, tmp_path: Path) -> None:
    build_engine(folder / "m.onnx", timing=False, cache=False, max_batch=4).save(tmp_path / "bare.plan", strip=True)
    onnx.save(chosen_rows(), tmp_path / "program.onnx")
    build_engine(tmp_path / "program.onnx", timing=False, cache=False).save(tmp_path / "program.plan")
    for a, b, why in (("bare.plan", folder / "m.onnx", "stripped"), ("bare.plan", "bare.plan", "stripped"),
                      ("program.plan", tmp_path / "program.onnx", "program")):
        actual = compare(tmp_path / a, tmp_path / b)
        assert actual.min_sqnr_db > 100 and not actual.layers
        assert any(note.startswith("layers are not compared: ") and why in note for note in actual.notes)


def test_open_shapes_are_compared_at_the_usual_ones(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        m (float[N,T,8] x) => (float[N,T,8] y) { h = MatMul(x, w) r = Sigmoid(h) y = MatMul(r, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(8, k=1, dtype=np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    build_engine(tmp_path / "m.onnx", timing=False, cache=False).save(tmp_path / "m.plan")
    usual = compare(tmp_path / "m.plan", tmp_path / "m.onnx")
    assert usual.min_sqnr_db > 100 and usual.layers and min(errors.sqnr_db for errors in usual.layers) > 100
    actual = compare(tmp_path / "m.plan", tmp_path / "m.onnx", lambda: [{"x": np.ones((1, 19, 8), np.float32)}])
    assert actual.min_sqnr_db > 100 and actual.items == 1 and not actual.layers
    assert any(note.startswith("1 of the items have other shapes") for note in actual.notes)
    assert compare(tmp_path / "m.onnx", tmp_path / "m.onnx").min_sqnr_db == math.inf


def test_a_plan_for_another_machine_is_compared_as_it_is_compiled_here(folder: Path, tmp_path: Path) -> None:
    build_engine(folder / "m.onnx", timing=False, cache=False, max_batch=4, target="sm_80").save(tmp_path / "gpu.plan")
    actual = compare(tmp_path / "gpu.plan", folder / "m.onnx", items=1)
    assert actual.min_sqnr_db > 60 and [errors.name for errors in actual.layers] == ["b", "d", "t", "p"]
    if "sm_80" not in actual.a:
        assert any("built for sm_80, and compiled again" in note for note in actual.notes)


# ---- errors
def test_other_inputs_and_outputs_are_refused_with_both_lists(folder: Path, tmp_path: Path) -> None:
    other = network()
    other.graph.output[0].name = other.graph.node[-1].output[0] = "z"
    onnx.save(other, tmp_path / "other.onnx")
    with pytest.raises(ConfigError, match=r"outputs differ.*m\.onnx has y, and .*other\.onnx has z"):
        compare(folder / "m.onnx", tmp_path / "other.onnx")
    other = network()
    other.graph.input[0].name = other.graph.node[0].input[0] = "pixels"
    onnx.save(other, tmp_path / "other.onnx")
    with pytest.raises(ConfigError, match=r"inputs differ.*has x float32, and .*has pixels float32"):
        compare(folder / "fp32.plan", tmp_path / "other.onnx")


def test_options_that_make_no_sense_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1 item"):
        compare(folder / "fp32.plan", folder / "m.onnx", items=0)
    with pytest.raises(ConfigError, match="no data are given"):
        compare(folder / "fp32.plan", folder / "m.onnx", preprocess="imagenet")


def test_an_item_that_onnx_runtime_refuses_is_the_users_error(folder: Path, tmp_path: Path) -> None:
    other = network()
    other.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 9
    onnx.save(other, tmp_path / "other.onnx")
    with pytest.raises(InputError, match=r"other\.onnx: .* cannot run an item"):
        compare(folder / "fp32.plan", tmp_path / "other.onnx")


def test_nan_and_other_shapes_are_as_bad_as_can_be() -> None:
    def errors(value: Any, reference: Any) -> Any:
        sums = ErrorSums("t")
        sums.add(np.array(value), np.array(reference))
        return sums.errors()
    odd = errors([1.0, math.nan], [1.0, 2.0])
    assert odd.sqnr_db == -math.inf and odd.largest == math.inf and 0 < odd.cosine < 1
    assert errors([1.0, -math.inf], [1.0, -math.inf]).sqnr_db == math.inf
    assert errors([3.0, 4.0], [3.0, 5.0]).largest == 1.0 and errors([3.0, 4.0], [3.0, 5.0]).relative == 0.5
    assert errors([1.0], [1.0, 2.0]).wrong and errors([1.0], [1.0, 2.0]).as_json()["sqnr_db"] is None
    assert errors(np.array(["a"], object), np.array(["a"], object)).sqnr_db == math.inf
    assert errors(np.array(["a"], object), np.array(["b"], object)).sqnr_db == -math.inf


# ---- the command
def test_statuses_and_the_json_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def status(*options: object) -> int:
        return cli.main(["-q", str(folder / "clipped.plan"), *map(str, options)])
    file = tmp_path / "found.json"
    assert status(folder / "fp32.plan", "--data", folder / "items.npy", "--worst", 1, "--json", file) == 0
    printed = capsys.readouterr().out
    assert "the worst 1 of 5 layers, in the order" in printed and "diverges first" in printed
    actual = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert actual["first_divergent"] == "d" and actual["items"] == 8 and len(actual["layers"]) == 5
    assert actual["outputs"][0]["name"] == "y" and actual["outputs"][0]["sqnr_db"] < 20
    assert status(folder / "fp32.plan", "--min-sqnr", 90, "--items", 1) == 1
    assert "below --min-sqnr 90: y" in capsys.readouterr().err
    assert status(folder / "clipped.plan", "--min-sqnr", 90, "--items", 1, "--json", file) == 0
    assert all(errors["equal"] and errors["sqnr_db"] is None
               for errors in json.loads(file.read_text(), parse_constant=pytest.fail)["layers"])
    assert status(folder / "missing.plan") == 2
    assert "missing.plan" in capsys.readouterr().err
