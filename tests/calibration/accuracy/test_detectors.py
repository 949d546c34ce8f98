"""Detectors are judged by boxes and scores separately; after a selection, by its inputs and by rows."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from infer_server.calibration import Calibration
from infer_server.calibration.accuracy.oracle import oracle_of
from infer_server.calibration.accuracy.structure import structure_of
from infer_server.calibration.accuracy.verify import Verification, verify, verify_engine
from infer_server.calibration.open_data import open_calibration_data
from infer_server.cli.verifying import listed
from infer_server.engines import build_engine
from infer_server.engines.compiler.ranges import Calibrated
from infer_server.engines.compiler.specialise import graph_at
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.file import read_plan, write_plan
from tests.calibration.detectors import concatenated, end_to_end, pictures, suppressed

OPTIONS: dict[str, Any] = {"cache": False, "timing": False}


def feeds(count: int = 8, seed: int = 0) -> list[dict[str, Array]]:
    return [{"x": item[None]} for item in pictures(count, seed)]


def built(folder: Path, model: onnx.ModelProto, precision: str = "fp32", **options: Any) -> tuple[Path, Path]:
    onnx.save(model, folder / "m.onnx")
    build_engine(folder / "m.onnx", precision=precision, **OPTIONS, **options).save(folder / "m.plan")
    return folder / "m.plan", folder / "m.onnx"


def verified(plan: Path, model: Path) -> Verification:
    return verify(plan, model, open_calibration_data(lambda: feeds(7, 1), read_plan(plan).inputs))


def altered(files: tuple[Path, Path], change: Any) -> Verification:
    """Verify an engine whose outputs are altered by `change`."""
    plan, model = read_plan(files[0]), files[1]
    graph = graph_at(plan)
    right = oracle_of(model, keep_batch=True)
    engine: Any = SimpleNamespace(inputs=plan.inputs, outputs=plan.outputs, plan=SimpleNamespace(dependence="so"),
                                  run=lambda feed: {"y": change(right.answer(feed)["y"].copy())})
    return verify_engine(engine, right, feeds(4), "int8", structure_of(plan, graph, ()))


def test_scores_that_became_zero_fail_though_the_whole_output_is_near(tmp_path: Path) -> None:
    def collapse(y: Array) -> Array:
        y[:, 4:] = np.where(y[:, 4:] > 0.9, 1, 0)
        return y

    found = altered(built(tmp_path, concatenated(), max_batch=4), collapse)
    assert not found.outputs[0].fault(found.limits) and found.outputs[0].sqnr_db > 30
    fault, = found.faults
    assert "'y: scores'" in fault and found.worst == "y: scores"
    assert [line.split()[:2] for line in listed(found).splitlines()[2:]] == [
        ["y", listed(found).splitlines()[2].split()[1]], ["y:", "boxes"], ["y:", "scores"]]
    assert listed(found).splitlines()[-1].endswith("FAILED, the worst part")


def test_an_output_of_one_scale_is_judged_as_a_whole(tmp_path: Path) -> None:
    assert altered(built(tmp_path, concatenated(), max_batch=4), lambda y: y * 1.001).faults == ()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_right_end_to_end_detector_passes(tmp_path: Path, precision: str) -> None:
    calibration = Calibration(feeds(), "minmax") if precision == "int8" else None
    found = verified(*built(tmp_path, end_to_end(), precision, calibration=calibration, max_batch=4))
    assert found.faults == () and found.outputs[0].rows > 0
    assert {part.name for part in found.parts} >= {"best, before a selection", "row_boxes, before a selection"}


def test_an_end_to_end_detector_whose_rows_swap_passes_and_one_of_other_boxes_fails(tmp_path: Path) -> None:
    files = built(tmp_path, end_to_end(), max_batch=4)
    order = np.random.default_rng(0).permutation(30)
    assert altered(files, lambda y: y[:, order]).faults == ()
    fault, = altered(files, lambda y: y + np.float32([200, 0, 0, 0, 0, 0])).faults
    assert "selected rows are none of the model's" in fault


def test_an_end_to_end_detector_of_other_weights_fails(tmp_path: Path) -> None:
    path, model = built(tmp_path, end_to_end(), max_batch=4)
    plan = read_plan(path)
    constants = np.frombuffer(plan.machine.constants, np.float32).copy()
    constants[::5] *= 1.5
    write_plan(replace(plan.with_machine(constants=constants.tobytes()), fingerprint=""), path)
    assert any("selected rows are none" in fault for fault in verified(path, model).faults)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_boxes_behind_a_suppression_are_compared_as_rows(tmp_path: Path, precision: str) -> None:
    calibration = Calibration(feeds(), "minmax") if precision == "int8" else None
    found = verified(*built(tmp_path, suppressed(), precision, calibration=calibration))
    assert found.faults == () and found.outputs[0].rows > 0


def test_an_int8_search_judges_what_enters_a_selection(tmp_path: Path) -> None:
    onnx.save(end_to_end(), tmp_path / "m.onnx")
    plan = build_engine(tmp_path / "m.onnx", precision="int8", calibration=Calibration(feeds()), **OPTIONS).plan
    best = max(plan.metadata["calibrators"].values(), key=lambda errors: errors["peak_db"])
    assert best["sqnr_db"] > 15 and best["part"] in ("row_boxes", "row_scores", "best")


class Poor(Calibration):
    """Calibration that finds its result too inexact."""

    def calibrate(self, *of: Any) -> Calibrated:
        return replace(super().calibrate(*of), poor=True, warnings=("INT8 loses the scores",))


def test_best_leaves_int8_where_a_part_is_lost_and_the_plan_keeps_the_warning(tmp_path: Path) -> None:
    onnx.save(concatenated(), tmp_path / "m.onnx")
    for precision, expected in (("best", False), ("int8", True)):
        build = build_engine(tmp_path / "m.onnx", precision=precision, calibration=Poor(feeds(), "minmax"), **OPTIONS)
        assert any(step.precision == "int8" for step in build.plan.machine.steps) is expected
        assert "INT8 loses the scores" in build.plan.metadata["notices"]
        assert any("the fastest float precision is taken" in notice for notice in build.notices) is not expected


OPEN = """<ir_version: 8, opset_import: ["" : 17]> m (float[N,3,H,W] x) => (float[N,C,P] y)
    { hidden = Conv<pads=[1,1,1,1]>(x, w)  active = Relu(hidden)  b = Conv(active, wb)  s = Conv(active, ws)
      flat = Constant<value = int64[3] {0, 0, -1}>()  boxes = Reshape(b, flat)  raw = Reshape(s, flat)
      hundred = Constant<value = float {100.0}>()  pixels = Mul(boxes, hundred)  scores = Sigmoid(raw)
      y = Concat<axis=1>(pixels, scores) }"""


def test_parts_are_judged_at_shapes_that_the_plan_was_not_built_for(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(OPEN)
    random = np.random.default_rng(0)
    for name, shape in (("w", (8, 3, 3, 3)), ("wb", (4, 8, 1, 1)), ("ws", (5, 8, 1, 1))):
        array = (0.3 * random.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    path, _ = built(tmp_path, model, profiles=({"x": ((1, 3, 4, 4), (1, 3, 8, 8), (4, 3, 16, 16))},))
    items = [{"x": random.standard_normal((1, 3, 8, width)).astype(np.float32)} for width in (8, 12, 8, 10)]
    data = open_calibration_data(lambda: items, read_plan(path).open.inputs)
    found = verify(path, tmp_path / "m.onnx", data)
    assert [part.name for part in found.parts] == ["y: pixels", "y: scores"] and found.faults == ()
    assert found.items == 4
