"""The field's workloads, each shrunk: built without an option, in float32 and INT8, they say what ONNX Runtime says."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from benchmarks.zoo.__main__ import report, row
from benchmarks.zoo.oracle import run_onnx
from benchmarks.zoo.pictures import feeds_for
from benchmarks.zoo.trial import Facts, Folder, compared
from benchmarks.zoo.workloads import WORKLOADS
from calibration import Calibration
from engines import build_engine

FLOAT_ERROR = 1e-3          # of the largest value
LEAST_DB = 10.0             # INT8 of random weights, few of them, in ranges of a few random inputs
COVERED = ("alexnet", "googlenet", "resnet18", "resnet34", "resnet50", "inception_v3")     # as TINY has them
BY_REFERENCE = {"mask_rcnn", "unet3d"}


@pytest.mark.parametrize("name", [name for name, one in WORKLOADS.items() if one.shrunk and name not in COVERED])
def test_a_workload_agrees_with_onnx_runtime_in_float_and_in_int8(name: str) -> None:
    """Which boxes Mask R-CNN keeps may be others in INT8, so that there is nothing to compare."""
    model = WORKLOADS[name].tiny()
    feeds = feeds_for(model, 2, seed=100)
    expected = list(run_onnx(model, feeds).values())
    items = [feeds_for(model, 1, seed) for seed in range(4)]
    precisions = {"fp32": None} if name == "mask_rcnn" else {"fp32": None, "int8": Calibration(items, "minmax")}
    for precision, calibration in precisions.items():
        build = build_engine(model, precision=precision, calibration=calibration, timing=False, cache=False)
        error, decibels = compared(expected, list(build.engine().run(feeds).values()))
        assert error < FLOAT_ERROR if precision == "fp32" else decibels > LEAST_DB
        assert not build.coverage.by_reference or name in BY_REFERENCE, build.coverage.reasons


@pytest.mark.parametrize("name", ["ssd_mobilenet_nms", "mask_rcnn_nms"])
def test_detectors_with_suppression_are_valid_models(name: str) -> None:
    plain = WORKLOADS[name.removesuffix("_nms")]
    model = plain.build(**{**plain.options, **plain.shrunk, "nms": True})
    onnx.checker.check_model(model, full_check=True)
    found = run_onnx(model, feeds_for(model, 1))
    assert all(np.isfinite(value).all() for value in found.values()) and "nms" in str(model.graph.node)


def test_rows_of_indices_are_compared_in_any_order() -> None:
    kept = np.array([[0, 1, 7], [0, 1, 9], [0, 2, 3], [0, 2, 4]])
    assert compared([kept], [kept[::-1]]) == (0, np.inf) and compared([kept], [kept[[0, 0, 2, 3]]])[0] == 0.25


def test_a_row_compares_turn_by_turn_and_a_failure_is_told(tmp_path) -> None:
    facts = Facts("dcgan", "fp32", steps=9, by_reference=1, reference_share=0.25, operators=("Unique",), error=1e-6,
                  sqnr_db=100.0, unit="ms", turns={"infer-server": [2.0, 4.0, 4.0], "ONNX Runtime": [4.0, 4.0, 8.0]},
                  notes={"OpenVINO": "it failed", "ONNX Runtime": "fp32"})
    folder = Folder(tmp_path, "dcgan", "fp32")
    folder.write(facts)
    assert folder.read() == facts
    assert row(facts)[3:10] == ["25.0 %: Unique", "1.0e-06", "100", "4 (2)", "2.00 (1.50 to 2.00)", "failed", 3]
    assert row(replace(facts, precision="int8", by_cost=True))[7::3] == ["2.00 (1.50 to 2.00, fp32)", "0, by cost"]
    assert "not built" in report([Facts("dlrm", "int8", failure="not built")])
