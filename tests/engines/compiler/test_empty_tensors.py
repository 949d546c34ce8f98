"""Tensors with an extent of 0, which is never taken for the batch."""
from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.engines.compiler.small_models import assert_right, engine_of, feeds_of, node, small_model

WEIGHT = np.arange(20, dtype=np.float32).reshape(4, 5)
NOTHING = np.zeros((0, 3), np.float32)
CUT = {"from": [1], "to": [1], "axis": [1]}

CASES = {
    "an input without rows": small_model([node("Relu", "x", "y")], {"x": [0, 4]}, ["y"]),
    "an input of items without elements": small_model([node("Relu", "x", "y")], {"x": ["n", 0]}, ["y"]),
    "a product of no rows": small_model([node("MatMul", "x w", "y")], {"x": [0, 4]}, ["y"], {"w": WEIGHT}),
    "a sum of no products": small_model([node("MatMul", "x w", "y")], {"x": ["n", 0]}, ["y"], {"w": WEIGHT[:0]}),
    "a layer without inputs has its bias": small_model(
        [node("Gemm", "x w b", "y")], {"x": ["n", 0]}, ["y"], {"w": WEIGHT[:0], "b": WEIGHT[1]}),
    "a sum over no rows": small_model([node("ReduceSum", "x axis", "y", keepdims=0)], {"x": [0, 4]}, ["y"],
                                      {"axis": [0]}),
    "a sum over no elements of an item": small_model([node("ReduceSum", "x axis", "y", keepdims=0)], {"x": ["n", 3, 0]},
                                                     ["y"], {"axis": [2]}),
    "many sums over no rows": small_model([node("ReduceSum", "x axis", "y", keepdims=0)], {"x": [0, 5000]}, ["y"],
                                          {"axis": [0]}),
    "a part without elements": small_model([node("Concat", "x z", "y", axis=1)], {"x": ["n", 0], "z": ["n", 3]}, ["y"]),
    "parts none of which has elements": small_model([node("Concat", "x x", "y", axis=1)], {"x": ["n", 0, 2]}, ["y"]),
    "a slice of nothing, joined again": small_model(
        [node("Slice", "x from to axis", "t"), node("Concat", "t x", "u", axis=1), node("Relu", "u", "y")],
        {"x": ["n", 3]}, ["y"], CUT),
    "a slice of nothing of an image": small_model(
        [node("Slice", "x from to axis", "t"), node("Relu", "t", "y")], {"x": ["n", 3, 4, 4]}, ["y"],
        {**CUT, "axis": [2]}),
    "a split with an empty part": small_model(
        [node("Split", "x sizes", "a b", axis=1), node("Relu", "a", "y"), node("Relu", "b", "z")], {"x": ["n", 3]},
        ["y", "z"], {"sizes": [0, 3]}),
    "padding around nothing": small_model([node("Pad", "x pads one", "y")], {"x": ["n", 0]}, ["y"],
                                          {"pads": [0, 1, 0, 2], "one": np.float32(1)}),
    "a lookup of nothing": small_model([node("Gather", "x index", "y", axis=1)], {"x": ["n", 4]}, ["y"],
                                       {"index": np.zeros(0, np.int64)}),
    "an operand without elements": small_model([node("Add", "x c", "y")], {"x": ["n", 1]}, ["y"],
                                               {"c": np.zeros(0, np.float32)}),
    "a softmax of nothing": small_model([node("Softmax", "x", "y")], {"x": ["n", 3, 0]}, ["y"]),
    "a transposed nothing": small_model([node("Transpose", "x", "y", perm=[0, 2, 1])], {"x": ["n", 3, 0]}, ["y"]),
    "nothing is written": small_model([node("ScatterND", "x index updates", "y")], {"x": [4, 3]}, ["y"],
                                      {"index": np.zeros((0, 1), np.int64), "updates": NOTHING}),
    "a range that ends before it begins": small_model(
        [node("Range", "start end one", "range"), node("CastLike", "range x", "f"), node("Add", "x f", "y")],
        {"x": ["n", 1]}, ["y"], {"start": 5, "end": 1, "one": 1}),
}


@pytest.mark.parametrize("model", CASES.values(), ids=CASES)
def test_an_engine_is_right_about(model: onnx.ModelProto) -> None:
    assert_right(model)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "best"])
def test_every_precision_takes_empty_tensors(precision: str) -> None:
    assert_right(CASES["a slice of nothing, joined again"], precision, tolerance=1e-2)


@pytest.mark.parametrize("one, constants", [
    (node("ReduceMean", "x axes", "y"), {"axes": [2, 3]}), (node("GlobalAveragePool", "x", "y"), {})])
def test_a_mean_over_nothing_is_0_as_in_onnx_runtime(one: onnx.NodeProto, constants: dict[str, list[int]]) -> None:
    model = small_model([one], {"x": ["n", 3, 4, 0]}, ["y"], constants)
    np.testing.assert_array_equal(engine_of(model).run(feeds_of(model))["y"], np.zeros((3, 3, 1, 1)))


def test_an_extent_of_zero_is_not_the_batch() -> None:
    engine = engine_of(CASES["an input without rows"])
    assert engine.max_batch == 0
    assert engine.inputs[0].shape == (0, 4)


def test_a_batch_of_no_items_gives_no_items() -> None:
    model = small_model([node("MatMul", "x w", "y")], {"x": ["n", 4]}, ["y"], {"w": WEIGHT})
    assert engine_of(model).run(feeds_of(model, batch=0))["y"].shape == (0, 5)
