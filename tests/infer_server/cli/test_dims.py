"""Tests of build-engine's use of the shapes in a server configuration."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.cli import build_engine
from infer_server.cli.dims import parse_dims, shapes_of_dims
from infer_server.engines.plan.file import read_plan


def added(path: Path, *shapes: tuple[str | int | None, ...] | None) -> str:
    """Return a model that adds inputs of these shapes; None stands for an unknown rank."""
    names = "abc"[:len(shapes)]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
              for name, shape in zip(names, shapes, strict=True)]
    graph = helper.make_graph([helper.make_node("Sum", [*names], ["y"])], "g", inputs,
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return str(path)


def test_dims_fix_what_the_model_leaves_open_with_or_without_the_batch(tmp_path: Path) -> None:
    path = added(tmp_path / "m.onnx", ("batch", "length", 4))
    for text, shape in (("a:7x4", (None, 7, 4)), ("a:-1x7x4", (None, 7, 4)), ("a:2x7x4", (2, 7, 4))):
        assert shapes_of_dims(path, dict([parse_dims(text)]), batch_first=False) == {"a": shape}
    for text in ("a:-1x4", "a:7", "other:7x4"):
        assert shapes_of_dims(path, dict([parse_dims(text)]), batch_first=True) == {}


@pytest.mark.parametrize(("dims", "batch_first", "shape"), [
    ("a:7x4", True, (None, 7, 4)), ("a:7x4", False, (7, 4)), ("a:-1x4", True, (None, None, 4)),
    ("a:-1x4", False, (None, 4)), ("a:", True, (None,)), ("a:", False, ()),
])
def test_dims_are_all_that_is_known_of_an_input_of_unknown_rank(tmp_path: Path, dims: str, batch_first: bool,
                                                                shape: tuple[int | None, ...]) -> None:
    path = added(tmp_path / "m.onnx", None, (None, 4))
    assert shapes_of_dims(path, dict([parse_dims(dims)]), batch_first) == {"a": shape}


@pytest.mark.parametrize(("shapes", "said"), [
    ([("n", 4), ("n", 4)], {}),                                         # the model says it itself
    ([(None, 4)], {}),
    ([(None, 4), (None, 4), (1, 4)], {"a": (None, 4), "b": (None, 4)}),
    ([("n", "l"), ("m", "l")], {"a": (None, None), "b": (None, None)}),
])
def test_leading_extents_are_the_batch_where_the_configuration_has_one_and_the_model_gives_them_no_one_name(
        tmp_path: Path, shapes: list[tuple[str | int | None, ...]], said: dict[str, Any]) -> None:
    path = added(tmp_path / "m.onnx", *shapes)
    assert shapes_of_dims(path, {}, batch_first=True) == said
    assert shapes_of_dims(path, {}, batch_first=False) == {}


def test_weights_are_not_read_to_find_what_the_model_leaves_open(tmp_path: Path) -> None:
    path = added(tmp_path / "m.onnx", (None, 4), (None, 4), (None, 4))
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 4), np.float32), "c"))   # an input of this name
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    assert shapes_of_dims(path, {}, batch_first=True) == {"a": (None, 4), "b": (None, 4)}


def test_the_dims_of_one_input_say_what_another_calls_by_the_same_name(tmp_path: Path) -> None:
    path = added(tmp_path / "m.onnx", ("n", "l"), ("m", "l"))
    assert build_engine.main([path, "-o", str(tmp_path / "m.plan"), "--no-timing", "--no-cache", "--quiet",
                              "--max-batch", "8", "--batch-first", "--dims", "a:7"]) == 0
    assert [tensor.shape for tensor in read_plan(tmp_path / "m.plan").inputs] == [("batch", 7)] * 2


def test_a_model_whose_inputs_leave_their_leading_extents_without_a_name_is_built_for_a_batch(tmp_path: Path) -> None:
    path = added(tmp_path / "m.onnx", (None, 4), (None, 4))
    assert build_engine.main([path, "-o", str(tmp_path / "m.plan"), "--no-timing", "--no-cache", "--quiet",
                              "--max-batch", "8", "--batch-first"]) == 0
    plan = read_plan(tmp_path / "m.plan")
    assert plan.max_batch == 8 and [tensor.shape for tensor in plan.inputs] == [("batch", 4)] * 2
