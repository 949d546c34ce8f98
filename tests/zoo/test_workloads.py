"""The workloads, shrunk and built without options, give ONNX Runtime's results in float32 and INT8."""
from __future__ import annotations

import numpy as np
import onnx
import pytest

from benchmarks.zoo.oracle import run_onnx
from benchmarks.zoo.pictures import feeds_for
from benchmarks.zoo.trial import compared
from benchmarks.zoo.workloads import WORKLOADS
from infer_server.calibration import Calibration
from infer_server.engines import build_engine

FLOAT_ERROR = 1e-3          # relative to the largest value
MIN_DB = 10.0               # INT8 of random weights, few of them, in ranges of a few random inputs
COVERED = ("alexnet", "googlenet", "resnet18", "resnet34", "resnet50", "inception_v3")     # as TINY has them
BY_REFERENCE = {"mask_rcnn", "unet3d"}


@pytest.mark.parametrize("name", [name for name, one in WORKLOADS.items() if one.shrunk and name not in COVERED])
def test_a_workload_agrees_with_onnx_runtime_in_float_and_in_int8(name: str) -> None:
    """Mask R-CNN is left out in INT8: it may keep other boxes, which cannot be compared."""
    model = WORKLOADS[name].tiny()
    feeds = feeds_for(model, 2, seed=100)
    expected = list(run_onnx(model, feeds).values())
    items = [feeds_for(model, 1, seed) for seed in range(4)]
    precisions = {"fp32": None} if name == "mask_rcnn" else {"fp32": None, "int8": Calibration(items, "minmax")}
    for precision, calibration in precisions.items():
        build = build_engine(model, precision=precision, calibration=calibration, timing=False, cache=False)
        error, decibels = compared(expected, list(build.engine().run(feeds).values()))
        assert error < FLOAT_ERROR if precision == "fp32" else decibels > MIN_DB
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
