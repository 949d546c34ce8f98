"""Rounding of weights in groups by the error of the layer's output."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from infer_server import Calibration, WeightOnly
from infer_server.calibration.weight_only import moments as module
from infer_server.calibration.weight_only.gptq import GPTQ, GptqRounder, by_output_error
from infer_server.calibration.weight_only.moments import LEAST_ROWS
from infer_server.engines.compiler.build import build_engine
from infer_server.engines.frontend.weight_only.groups import LIMITS, nearest
from infer_server.engines.frontend.weight_only.layers import Layer
from tests.engines.compiler.weight_only.models import encoder, model, normal, product, sqnr_db


def correlated(rows: int, width: int, seed: int = 0) -> NDArray[np.float32]:
    """Return rows that mix a few signals, as activations do."""
    return normal(rows, width // 8, seed=seed) @ normal(width // 8, width, seed=99) + 0.1 * normal(rows, width, seed=7)


@pytest.mark.parametrize("bits, group", [(4, 32), (4, 128), (8, 100)])
def test_output_errors_fall_below_those_of_the_nearest_integers(bits: int, group: int) -> None:
    rows, x = normal(24, 100), correlated(1000, 100)
    hessian = (x.T @ x / len(x)).astype(np.float64)
    found, plain = by_output_error(rows, hessian, bits, group), nearest(rows, bits, group, np.diagonal(hessian))
    low, high = LIMITS[bits]
    assert low <= found.numbers.min() and found.numbers.max() <= high and found.scales.shape == plain.scales.shape
    unseen = correlated(500, 100, seed=3)
    error, usual = (np.square(unseen @ (one.real() - rows).T).mean() for one in (found, plain))
    assert error < usual / 2


def test_inputs_without_correlation_or_values_leave_the_nearest_integers() -> None:
    rows = normal(7, 70)
    for hessian in (np.eye(70), np.zeros((70, 70))):
        np.testing.assert_allclose(by_output_error(rows, hessian, 4, 32).real(), nearest(rows, 4, 32).real(), 1e-5)


def test_the_method_with_the_lower_error_is_taken() -> None:
    rows, layer = normal(8, 64), Layer("n", 0, False, "x", "w", True)
    x = correlated(500, 64)
    hessian = (x.T @ x / len(x)).astype(np.float64)
    found, method, output_db = GptqRounder(lambda tensor: hessian)(layer, rows, 4, 32)
    signal, noise = (np.square(x @ weights.T).mean() for weights in (rows, rows - found.real()))
    assert method == GPTQ and output_db == pytest.approx(10 * np.log10(signal / noise), abs=0.1)
    assert GptqRounder(lambda tensor: None)(layer, rows, 4, 32)[1:] == ("nearest", None)
    exact = np.rint(rows).clip(-7, 7)
    exact[:, ::32] = 7
    assert GptqRounder(lambda tensor: hessian)(layer, exact, 4, 32)[2] is None


def feeds(items: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"x": correlated(5, 200, seed=seed + item)[None]} for item in range(items)]


@pytest.mark.parametrize("scheme", [WeightOnly("int4"), WeightOnly("int8")], ids=repr)
def test_calibration_data_lower_the_error_on_unseen_items(scheme: WeightOnly) -> None:
    proto = product(normal(200, 96))
    builds = [build_engine(proto, cache=False, timing=False, weight_only=scheme, calibration=some)
              for some in (None, Calibration(feeds(100)))]
    x = {"x": np.concatenate([feed["x"] for feed in feeds(20, seed=1000)])}
    expected = x["x"] @ normal(200, 96)
    plain, calibrated = (sqnr_db(expected, build.engine().run(x)["y"]) for build in builds)
    assert calibrated > plain + 3
    (layer,) = builds[1].plan.metadata["weights"]["layers"]
    assert layer["rounding"] == GPTQ and layer["output_sqnr_db"] == pytest.approx(calibrated, abs=1)


def test_too_few_rows_round_to_the_nearest() -> None:
    few = Calibration(feeds(int(LEAST_ROWS * 200) // 5 - 1))
    build = build_engine(product(normal(200, 96)), cache=False, timing=False, weight_only=WeightOnly("int4"),
                         calibration=few)
    assert build.plan.metadata["weights"]["layers"][0]["rounding"] == "nearest"


@pytest.mark.parametrize("most", [1 << 30, 1])
def test_inner_tensors_are_observed_in_one_pass_or_several(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", most)
    stages: list[tuple[str, int, int]] = []
    items = [{"ids": np.random.default_rng(seed).integers(0, 300, (1, 7))} for seed in range(128)]
    build = build_engine(encoder(), cache=False, timing=False, weight_only=WeightOnly("int4"), precision="fp16",
                         calibration=Calibration(items), progress=lambda *stage: stages.append(stage[:3]))
    report = build.plan.metadata["weights"]["layers"]
    assert [layer["rounding"] for layer in report] == ["nearest", GPTQ, GPTQ]
    assert stages.count(("calibrating", 128, 0)) == (1 if most > 1 else 2)


def test_padded_positions_are_left_out() -> None:
    nodes = [helper.make_node("Cast", ["attention_mask"], ["m"], to=TensorProto.FLOAT),
             helper.make_node("Unsqueeze", ["m", "axis"], ["column"]),
             helper.make_node("MatMul", ["x", "w"], ["h"], "layer"), helper.make_node("Mul", ["h", "column"], ["y"])]
    proto = model(nodes, {"x": (TensorProto.FLOAT, ["N", 8, 128]), "attention_mask": (TensorProto.INT64, ["N", 8])},
                  {"y": ["N", 8, 128]}, {"w": normal(128, 128), "axis": np.array([2])})

    def build(padding: float) -> NDArray[Any]:
        items = []
        for seed in range(100):
            x = correlated(8, 128, seed=seed)[None]
            x[:, 4:] *= padding
            items.append({"x": x, "attention_mask": (np.arange(8) < 4).astype(np.int64)[None]})
        made = build_engine(proto, cache=False, timing=False, weight_only=WeightOnly("int4"),
                            calibration=Calibration(items))
        assert made.plan.metadata["weights"]["layers"][0]["rounding"] == GPTQ
        ones = {"x": np.ones((1, 8, 128), np.float32), "attention_mask": np.ones((1, 8), np.int64)}
        return np.asarray(made.engine().run(ones)["y"])

    np.testing.assert_array_equal(build(0), build(100))
