"""Graph outputs that no node computes: constants, inputs, scalars."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from infer_server.engines.compiler.specialise import relower
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.small_models import assert_right, node, small_model

RELU = node("Relu", "x", "y")
PAIR = np.array([1.5, -2], np.float32)

CASES = {
    "a constant": small_model([RELU], {"x": ["n", 4]}, ["y", "c"], {"c": PAIR}),
    "a number": small_model([RELU], {"x": ["n", 4]}, ["y", "c"], {"c": np.float32(3)}),
    "a constant that is read too": small_model([node("Add", "x c", "y")], {"x": ["n", 2]}, ["y", "c"], {"c": PAIR}),
    "a folded constant": small_model([RELU, node("Add", "c c", "d")], {"x": ["n", 4]}, ["y", "d"], {"c": PAIR}),
    "a shape": small_model([node("Shape", "x", "y")], {"x": [3, 4]}, ["y"]),
    "integers of 16 bits": small_model([RELU], {"x": ["n", 4]}, ["y", "c"], {"c": np.array([[-3], [7]], np.int16)}),
    "truth": small_model([RELU], {"x": ["n", 4]}, ["y", "c"], {"c": np.array([True, False])}),
    "nothing": small_model([RELU], {"x": ["n", 4]}, ["y", "c"], {"c": np.zeros((2, 0), np.float32)}),
    "all outputs": small_model([node("Identity", "c", "y")], {"x": ["n", 4]}, ["y"], {"c": PAIR}),
    "without inputs": small_model([node("Identity", "c", "y")], {}, ["y"], {"c": PAIR}),
    "an input under its name": small_model([RELU], {"x": ["n", 4]}, ["y", "x"]),
    "an input under another": small_model([node("Identity", "x", "y")], {"x": ["n", 4]}, ["y"]),
    "a number passed through": small_model([node("Identity", "x", "y")], {"x": []}, ["y"]),
    "one value under two names": small_model(
        [node("Relu", "x", "t"), node("Identity", "t", "y"), node("Identity", "t", "z")], {"x": ["n", 4]}, ["y", "z"]),
    "a number of a number": small_model([node("Add", "x x", "t"), node("Tanh", "t", "y")], {"x": []}, ["y"]),
    "a number of one element": small_model([node("Squeeze", "x", "t"), node("Exp", "t", "y")], {"x": [1, 1]},
                                           ["y"]),
    "a number that scales a matrix": small_model(
        [node("ReduceMax", "x", "m", keepdims=0), node("Abs", "m", "a"), node("Div", "x a", "y")], {"x": [3, 4]},
        ["y"]),
}


@pytest.mark.parametrize("model", CASES.values(), ids=CASES)
def test_an_engine_gives(model: onnx.ModelProto) -> None:
    assert_right(model)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "best"])
def test_a_constant_output_keeps_its_value_in_every_precision(precision: str) -> None:
    assert_right(CASES["a constant that is read too"], precision, tolerance=1e-2)


def test_a_constant_output_survives_the_file_and_another_machine(tmp_path: Path) -> None:
    plan = assert_right(CASES["a constant"]).plan
    write_plan(plan, str(tmp_path / "m.plan"))
    for again in (read_plan(str(tmp_path / "m.plan")), relower(plan)):
        np.testing.assert_array_equal(Engine(again).run({"x": np.zeros((1, 4), np.float32)})["c"], PAIR)
