"""Verification passes what is right, finds what is wrong, and says by how much and where."""
from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto

from infer_server.calibration import Calibration
from infer_server.calibration.accuracy.errors import LIMITS, OutputErrors
from infer_server.calibration.accuracy.oracle import Oracle, oracle_of
from infer_server.calibration.accuracy.verify import verify, verify_engine
from infer_server.calibration.data.generated import generated, index_bound
from infer_server.calibration.open_data import open_calibration_data
from infer_server.engines import build_engine
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import ModelError
from infer_server.engines.ir.graph import Array
from infer_server.engines.ir.recipe import Pixels
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.engines.plan.plan import IoTensor
from tests.engines.compiler.half_models import halved
from tests.engines.compiler.open_models import random
from tests.engines.compiler.program_models import chosen_patches, chosen_rows, scanned
from tests.engines.compiler.recurrent_models import MODELS
from tests.zoo import TINY

TOKENS = """<ir_version: 8, opset_import: ["" : 17]>
    m (int64[N,5] ids, int64[N,5] attention_mask, float[N,5,4] x) => (float[N,5,4] y)
    { wide = Cast<to = 1>(attention_mask)  axis = Constant<value = int64[1] {2}>()  mask = Unsqueeze(wide, axis)
      rows = Gather(table, ids)  kept = Mul(rows, mask)  y = Add(kept, x) }"""


def built(folder: Path, model: onnx.ModelProto, **config: Any) -> tuple[Path, Path]:
    """Return the paths of the plan and of the model."""
    onnx.save(model, folder / "m.onnx")
    builder = Builder(BuildConfig(timing=False, max_batch=4, **config))
    write_plan(builder.plan(builder.graph(folder / "m.onnx")), folder / "m.plan")
    return folder / "m.plan", folder / "m.onnx"


def tokens() -> onnx.ModelProto:
    model = onnx.parser.parse_model(TOKENS)
    table = np.random.default_rng(0).standard_normal((11, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    return model


def without_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))


# ---- plans
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_right_plan_passes(tmp_path: Path, precision: str) -> None:
    found = verify(*built(tmp_path, TINY["explicit_pads"](), precision=precision))
    assert (found.precision, found.faults, found.items) == (precision, (), 13)
    assert found.oracle.startswith("ONNX Runtime") and found.outputs[0].name == "output"
    assert 0 < found.outputs[0].relative < LIMITS[precision].relative


@pytest.mark.parametrize("to, precision", [(TensorProto.FLOAT16, "fp16"), (TensorProto.BFLOAT16, "bf16")])
def test_a_model_of_16_bits_is_judged_by_their_rounding(tmp_path: Path, to: int, precision: str) -> None:
    found = verify(*built(tmp_path, halved(MODELS["both ways"](), to), precision="fp32"))
    assert (found.precision, found.faults) == (precision, ())


def test_a_plan_of_other_weights_fails_and_the_output_is_named(tmp_path: Path) -> None:
    path, model = built(tmp_path, TINY["explicit_pads"]())
    plan = read_plan(path)
    constants = np.frombuffer(plan.machine.constants, np.float32).copy()
    constants[::7] *= 1.5
    write_plan(replace(plan.with_machine(constants=constants.tobytes()), fingerprint=""), path)
    fault, = verify(path, model).faults
    assert "output 'output': its largest error is" in fault and "at most 0.001 may be" in fault


def test_without_onnx_runtime_the_reference_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = built(tmp_path, TINY["explicit_pads"]())
    without_onnx_runtime(monkeypatch)
    found = verify(*files)
    assert found.oracle == "the NumPy reference" and not found.faults


def test_what_onnx_runtime_refuses_the_reference_answers(tmp_path: Path) -> None:
    """ONNX Runtime's Python interface has no bfloat16."""
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> m (bfloat16[N,4] x) => (bfloat16[N,4] y) '
                                    "{ y = Relu(x) }")
    found = verify(*built(tmp_path, model))
    assert "the NumPy reference; ONNX Runtime refuses the model" in found.oracle and not found.faults


@pytest.mark.parametrize("installed", [True, False])
def test_an_engine_that_takes_pixels_is_compared_with_the_model_that_takes_floats(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    pixels = Pixels((0.02, 0.01, 0.03), (-1.0, -2.0, 0.5))
    files = built(tmp_path, TINY["explicit_pads"](), pixels=pixels)
    if not installed:
        without_onnx_runtime(monkeypatch)
    assert not verify(*files, pixels=pixels).faults
    assert verify(*files, pixels=replace(pixels, shift=(1.0, -2.0, 0.5))).faults


# ---- inputs
def test_generated_token_numbers_stay_below_the_vocabulary_and_masks_are_ones(tmp_path: Path) -> None:
    path, model = built(tmp_path, tokens())
    graph, inputs = Builder(BuildConfig()).graph(model), read_plan(path).inputs
    assert index_bound(graph, "ids") == 11 and index_bound(graph, "x") is None
    ids, masks = (np.concatenate([item[name] for item in generated(inputs, graph, 40)])
                  for name in ("ids", "attention_mask"))
    assert set(ids.ravel()) == set(range(11)) and (masks == 1).all()
    assert not verify(path, model).faults


def test_generated_items_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    path, model = built(tmp_path, tokens())
    graph, inputs = Builder(BuildConfig()).graph(model), read_plan(path).inputs
    first, second, other = (next(iter(generated(inputs, graph, 1, seed)))["x"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


# ---- verdicts
def judged(expected: Array, value: Array, run: Callable[[Array], Array] | None = None,
           precision: str = "fp32") -> tuple[OutputErrors, tuple[str, ...]]:
    """Return the errors and faults of an engine that returns `value` where `expected` is right."""
    tensor = IoTensor("y", str(expected.dtype), ("batch", *expected.shape[1:]))
    rows = IoTensor("x", "int64", ("batch",))
    engine: Any = SimpleNamespace(inputs=[rows], outputs=[tensor], plan=SimpleNamespace(dependence=""),
                                  run=lambda feed: {"y": (run or (lambda x: value[x]))(feed["x"])})
    found = verify_engine(engine, Oracle("what is right", lambda feed: {"y": expected[feed["x"]]}),
                          [{"x": np.arange(len(expected))}], precision)
    return found.outputs[0], found.faults


SIGNAL = np.random.default_rng(3).standard_normal((3, 40)).astype(np.float32)


def test_errors_are_measured_and_the_item_is_named() -> None:
    value = SIGNAL.copy()
    value[2, 7] += 0.5
    errors, faults = judged(SIGNAL, value)
    assert errors.largest == pytest.approx(0.5) and errors.item == 2 and errors.median == 0
    assert errors.relative == pytest.approx(0.5 / np.ptp(SIGNAL)) and errors.mean == pytest.approx(0.5 / SIGNAL.size)
    assert errors.differing == pytest.approx(1 / SIGNAL.size) and "(item 2)" in faults[0]


@pytest.mark.parametrize("precision", LIMITS)
def test_nan_where_a_number_should_be_is_a_fault_in_every_precision(precision: str) -> None:
    value = SIGNAL.copy()
    value[0, 0] = np.nan
    errors, faults = judged(SIGNAL, value, precision=precision)
    assert errors.odd == 1 and "NaN or infinite" in faults[0]


def test_infinities_and_nans_that_should_be_there_are_none() -> None:
    expected = SIGNAL.copy()
    expected[0, :3] = np.nan, np.inf, -np.inf
    assert not judged(expected, expected.copy())[1]
    wrong = expected.copy()
    wrong[0, 2] = np.inf
    assert judged(expected, wrong)[1]


def test_an_output_without_a_finite_value_proves_nothing() -> None:
    assert "nothing can be compared" in judged(np.full_like(SIGNAL, np.nan), np.full_like(SIGNAL, np.nan))[1][0]


def test_another_shape_or_dtype_is_a_fault() -> None:
    assert "float32[3, 20]" in judged(SIGNAL, SIGNAL[:, :20])[1][0]
    assert "float64[3, 40]" in judged(SIGNAL, SIGNAL.astype(np.float64))[1][0]


def test_integers_are_judged_by_the_share_that_differs() -> None:
    expected = np.arange(300).reshape(3, 100)
    value = expected.copy()
    value[0, :3] = 0        # the first is 0
    assert not judged(expected, value)[1]
    value[1, :10] = 0
    assert "4.0 % of the elements differ" in judged(expected, value)[1][0]


def test_an_item_that_depends_on_its_batch_is_found() -> None:
    def run(x: Array) -> Array:
        return SIGNAL[x] if len(x) > 1 else SIGNAL[x] * 2       # right for the whole batch

    fault, = judged(SIGNAL, SIGNAL, run)[1]
    assert "of an item depends on what else is in its batch" in fault


def test_int8_is_judged_by_its_signal_to_noise_ratio() -> None:
    noise = np.random.default_rng(4).standard_normal(SIGNAL.shape).astype(np.float32)
    assert not judged(SIGNAL, SIGNAL + noise / 4, precision="int8")[1]
    assert "SQNR is" in judged(SIGNAL, SIGNAL + noise, precision="int8")[1][0]


def test_an_empty_output_is_right() -> None:
    assert not judged(SIGNAL[:, :0], SIGNAL[:, :0])[1]


def test_the_oracle_of_a_file_that_is_no_model_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="m.onnx"):
        oracle_of(tmp_path / "m.onnx")


def test_a_program_is_judged_by_the_coarsest_of_its_segments(tmp_path: Path) -> None:
    onnx.save(chosen_patches(), tmp_path / "m.onnx")
    data = [{"x": random(1, 3, 6, 8)}]
    for precision in ("fp32", "int8"):
        calibration = Calibration(data, "minmax") if precision == "int8" else None
        build_engine(tmp_path / "m.onnx", precision=precision, calibration=calibration, cache=False,
                     timing=False).save(tmp_path / "m.plan")
        inputs = read_plan(tmp_path / "m.plan").inputs
        found = verify(tmp_path / "m.plan", tmp_path / "m.onnx", open_calibration_data(lambda: data, inputs))
        assert (found.precision, found.faults) == (precision, ())


@pytest.mark.parametrize("factor, rows, notes", [(1.0, True, 0), (0.0, False, 1)])
def test_a_program_is_verified_on_random_numbers_and_says_if_nothing_is_compared(
        tmp_path: Path, factor: float, rows: bool, notes: int) -> None:
    """With zeros, the likely input, no element is chosen."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> m (float[N,4] x) => (float[k] y) '
        f"<float[1] c = {{{factor}}}> {{ m = Mul(x, c) n = NonZero(m) t = Transpose(n) g = GatherND(m, t) "
        "y = Exp(g) }")
    onnx.save(model, tmp_path / "m.onnx")
    build_engine(tmp_path / "m.onnx", timing=False, cache=False).save(tmp_path / "m.plan")
    found = verify(tmp_path / "m.plan", tmp_path / "m.onnx")
    assert not found.faults and (found.outputs[0].rows > 0) is rows
    assert len([note for note in found.notes if "nothing is compared" in note]) == notes


@pytest.mark.parametrize("model", [chosen_patches, chosen_rows, scanned])
def test_a_program_has_a_reference_without_onnx_runtime(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Callable[[], onnx.ModelProto]) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    build_engine(tmp_path / "m.onnx", cache=False, timing=False).save(tmp_path / "m.plan")
    without_onnx_runtime(monkeypatch)
    found = verify(tmp_path / "m.plan", tmp_path / "m.onnx")
    assert (found.oracle, found.faults) == ("the NumPy reference", ())
