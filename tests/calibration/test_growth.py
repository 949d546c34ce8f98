"""Ranges that still grow with the last items are told, and ranges do not depend on the order or batches of items."""
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import parser

from infer_server.calibration import Calibration
from infer_server.calibration.data.checks import dead_channels
from infer_server.calibration.growth import Growth
from infer_server.calibration.histogram import Histogram
from infer_server.calibration.table import read_table
from infer_server.engines import build_engine
from infer_server.engines.ir.graph import Array

MODEL = parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 3] y) '
    f"<float[4, 8] a = {{{', '.join(str(0.1 * (i % 7 - 3)) for i in range(32))}}}, "
    f"float[8, 3] b = {{{', '.join(str(0.2 * (i % 5 - 2)) for i in range(24))}}}> "
    "{ h = MatMul(x, a) r = Relu(h) y = MatMul(r, b) }")


def warning(items: Iterable[Array], tensors: int = 5) -> str:
    """Return the warning if one of the tensors holds the items and the others stay within [-1, 1]."""
    growth, histograms = Growth(), {f"t{i}": Histogram() for i in range(tensors)}
    count = 0
    for item in items:
        count += 1
        for name, histogram in histograms.items():
            histogram.observe(item if name == "t0" else np.clip(item, -1.0, 1.0))
        growth.record(count, histograms)
    return growth.warning(count, histograms)


def test_a_range_that_grows_at_the_end_is_told() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, (100, 50)).astype(np.float32)
    values[:, 0] = 1.0
    assert warning(values) == ""
    values[90] *= 4.0
    assert "ranges of 1 of 5 tensors grew by more than 20 % in the last" in warning(values)
    assert "'t0'" in warning(values)
    assert warning(values, tensors=20) == ""      # one tensor of many is no reason
    assert warning(values[::-1]) == ""            # it is an early item


def test_channels_that_are_zero_are_told() -> None:
    alive = np.array([0.0, 1.0, -2.0, 0.5])
    assert dead_channels({"x": alive, "y": alive}) == ""
    assert "3 of 4 channels of 'y' are zero" in dead_channels({"x": alive, "y": np.array([0.0, 0.0, 0.0, 1.0])})


def build(feeds: Sequence[Array], path: str = "") -> Sequence[str]:
    calibration = Calibration([{"x": feed} for feed in feeds], "minmax", path)
    return build_engine(MODEL, precision="int8", cache=False, timing=False, calibration=calibration).notices


def test_a_build_tells_both() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40, 4)).astype(np.float32)
    assert not [notice for notice in build([values]) if "channels" in notice or "grew" in notice]
    values[-1] *= 100.0
    assert any("grew by more than 20 %" in notice for notice in build(np.split(values, 40)))
    zeros = values * np.array([1, 0, 0, 0], np.float32)
    assert any("3 of 4 channels of 'x' are zero" in notice for notice in build([zeros]))


@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_ranges_do_not_depend_on_order_and_batches(tmp_path: Path, pieces: int) -> None:
    values = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    build([values], str(tmp_path / "a.json"))
    shuffled = np.random.default_rng(1).permutation(values)
    build(np.array_split(shuffled, pieces), str(tmp_path / "b.json"))
    assert read_table(tmp_path / "a.json").ranges == read_table(tmp_path / "b.json").ranges
