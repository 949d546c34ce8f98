"""Calibrations on parts of the data are merged to that on all data."""
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import parser

from infer_server.calibration import Calibration
from infer_server.calibration.table import read_table
from infer_server.cli.build_engine import main
from infer_server.engines import build_engine
from infer_server.engines.errors import ConfigError
from infer_server.engines.plan.file import read_plan

MODEL = parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 4] y) '
    f"<float[4, 4] w = {{{', '.join(str(0.1 * (i % 5 - 2)) for i in range(16))}}}> "
    "{ a = MatMul(x, w) b = Relu(a) y = MatMul(b, w) }")
VALUES = np.random.default_rng(0).standard_normal((48, 4)).astype(np.float32)


def build(calibration):
    return build_engine(MODEL, precision="int8", timing=False, cache=False, calibration=calibration)


@pytest.fixture
def parts(tmp_path):
    """Write the caches of two parts of the data."""
    files = [tmp_path / f"{name}.json" for name in "ab"]
    for file, part in zip(files, (VALUES[:16], VALUES[16:]), strict=True):
        build(Calibration([{"x": part}], "percentile", cache=file))
    return files


def test_the_plan_is_that_of_all_data(parts, tmp_path):
    merged = build(Calibration(parts=parts, cache=tmp_path / "merged.json"))
    whole = build(Calibration([{"x": VALUES}], "percentile", cache=tmp_path / "whole.json"))
    assert read_table(tmp_path / "merged.json") == replace(read_table(tmp_path / "whole.json"), fault="")
    for one, other in zip(merged.engine().run({"x": VALUES}).values(), whole.engine().run({"x": VALUES}).values(),
                          strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ConfigError, match="give one of them"):
        Calibration([{"x": VALUES}], parts=parts)


def test_the_command_merges(parts, tmp_path):
    onnx.save(MODEL, tmp_path / "m.onnx")
    command = [str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.plan"), "--int8", "--no-timing", "--no-cache", "-q"]
    assert main([*command, *(word for part in parts for word in ("--calib-part", str(part)))]) == 0
    assert read_plan(tmp_path / "m.plan").metadata["calibration_items"] == 48
