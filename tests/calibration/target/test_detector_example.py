"""The metric of boxes that the guide shows computes F1, and a build takes it."""
import numpy as np
import pytest
from onnx import parser

from infer_server.calibration import Calibration
from infer_server.calibration.target.search import AccuracyTarget
from infer_server.engines import build_engine
from tests.docs.pages import ROOT, blocks


@pytest.fixture
def source():
    """Return the example's code."""
    page = ROOT / "docs" / "howto" / "accuracy-target.md"
    return next(block.code for block in blocks(page) if "f1_of_boxes" in block.code)


def test_the_example_computes_f1(source):
    names = {}
    exec(source, names)
    a, b, other_class = [0, 0, 10, 10, 0.9, 1], [20, 20, 30, 30, 0.8, 1], [0, 0, 10, 10, 0.9, 2]
    near, far, weak = [0, 0, 10, 8, 0.7, 1], [8, 8, 18, 18, 0.7, 1], [50, 50, 60, 60, 0.1, 1]

    def score(*items):
        return names["f1_of_boxes"](None, [{"boxes": np.array(boxes, np.float32)[None]} for boxes in items], None)

    assert score([a, b], [a]) == 1.0                    # the float model, whose boxes are expected from now on
    assert score([b, a], [a]) == 1.0
    assert score([near, b, weak], [near]) == 1.0
    assert score([a, b], [far]) == pytest.approx(2 * 2 / (3 + 3))
    assert score([a], [other_class]) == pytest.approx(2 * 1 / (2 + 3))
    assert score([a, a, b], [a]) == pytest.approx(2 * 3 / (4 + 3))      # a box matches once


def test_a_build_takes_the_example(source, tmp_path):
    (tmp_path / "metric.py").write_text(source)
    box = ", ".join(str(value) for _ in range(4) for value in (0, 0, 1, 1, 0.5, 0))
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 6] boxes) '
        f"<float[4, 6] w = {{{box}}}> {{ boxes = MatMul(x, w) }}")
    feeds = [{"x": np.random.default_rng(i).random((1, 4), np.float32) + 0.5} for i in range(8)]
    target = AccuracyTarget(0.1, f"{tmp_path / 'metric.py'}:f1_of_boxes", feeds)
    found = build_engine(model, precision="int8", timing=False, cache=False,
                         calibration=Calibration(feeds, "minmax", target=target)).plan.metadata["target"]
    assert found["float"] == 1.0 and found["met"]
