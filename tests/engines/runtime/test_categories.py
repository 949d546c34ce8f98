"""Trial runs of programs feed strings that the encoders know."""
from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper

from infer_server.backend import load_plan
from infer_server.calibration.accuracy.verify import verify
from infer_server.cli import run_engine
from infer_server.engines import build_engine
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.load.create import engine_of
from tests.engines.runtime.string_models import COLOURS, SIZES, columns, joined
from tests.infer_server.serving import serving


def made(model: onnx.ModelProto) -> Engine:
    return engine_of(build_engine(model, cache=False, timing=False).plan)


def usual(engine: Engine) -> list[list[str]]:
    context = engine.create_context()
    context.execute()
    return [context.input(io.name).tolist() for io in engine.inputs]


def test_each_column_has_a_category_of_its_own_encoder() -> None:
    assert usual(made(columns())) == [[["green", "large"]]]
    assert usual(made(joined())) == [[["green"]], [["large"]]]


def test_a_column_that_two_encoders_read_has_a_category_of_both() -> None:
    model = columns([["left", "both"], SIZES])
    model.graph.node.insert(0, helper.make_node("OneHotEncoder", ["column0"], ["other"], domain="ai.onnx.ml",
                                                cats_strings=["right", "both"], zeros=0))
    model.graph.node.insert(0, model.graph.node.pop(1))
    model.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, ["n", 1, 2]))
    assert usual(made(model)) == [[["both", "large"]]]


def test_more_rows_have_the_same_categories() -> None:
    engine = made(columns())
    words = engine.executor.usual(engine.inputs[0], (3, 2))
    assert words.tolist() == [["green", "large"]] * 3


def test_texts_that_nothing_encodes_are_numbers() -> None:
    model = helper.make_model(helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT32)], "numbers",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["n", 3])]),
        opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    assert usual(made(model)) == [[["1", "1", "1"]]]


@pytest.mark.parametrize("installed", [True, False])
def test_a_model_of_strings_is_verified_and_measured(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    onnx.save(columns(), tmp_path / "m.onnx")
    build_engine(tmp_path / "m.onnx", cache=False, timing=False).save(tmp_path / "m.plan")
    if not installed:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    found = verify(tmp_path / "m.plan", tmp_path / "m.onnx")
    assert found.faults == () and found.oracle.startswith("ONNX Runtime" if installed else "the NumPy reference")
    assert run_engine.main([str(tmp_path / "m.plan"), "--seconds", "0.01"]) == 0


def refusing() -> onnx.ModelProto:
    """Return a model in which two encoders with disjoint categories read one column, so every string is refused."""
    model = columns([COLOURS, SIZES])
    model.graph.node[3].input[1] = "place0"
    return model


def test_a_model_is_served_whose_strings_are_known_and_one_whose_are_not_without_a_warm_up(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, model in (("known", columns()), ("refused", refusing())):
        (tmp_path / name / "1").mkdir(parents=True)
        build_engine(model, timing=False, cache=False).save(tmp_path / name / "1" / "model.plan")
    with (caplog.at_level(logging.WARNING), serving(tmp_path, load_plan) as server,
          triton.InferenceServerClient(server.address) as client):
        tensor = triton.InferInput("x", [1, 2], "BYTES")
        tensor.set_data_from_numpy(np.array([["red", "small"]], object))
        np.testing.assert_array_equal(client.infer("known", [tensor]).as_numpy("y"), [[0, 1, 0, 0, 1]])
        assert client.is_model_ready("refused")
    lines = [record.getMessage() for record in caplog.records if "without a warm-up" in record.getMessage()]
    assert len(lines) == 1 and "is none of its categories" in lines[0]


def test_strings_may_come_as_utf_8_and_other_bytes_stay_what_they_are() -> None:
    engine = made(columns([["grün", "red"], SIZES]))
    np.testing.assert_array_equal(engine.run({"x": np.array([["grün".encode(), b"large"]], object)})["y"],
                                  [[1, 0, 1, 0, 0]])
    assert made(columns(zeros=1)).run({"x": np.array([[b"\xff", b"small"]], object)})["y"].tolist() == [[0, 0, 0, 0, 1]]
