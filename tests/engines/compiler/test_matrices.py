"""MatMul with constant weights, compared with ONNX Runtime; its rows are rows of the kernel on any axes."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from infer_server.engines import build_engine
from infer_server.engines.plan.plan import Step
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.small_models import small_model
from tests.engines.compiler.test_attention import MAX_BATCH, built
from tests.zoo import run_onnx

FLOAT, DEPTH, COLUMNS = onnx.TensorProto.FLOAT, 33, 40
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2, "int8": 4e-2}


def layers(shape: Sequence[int | str], cut: tuple[int, int, int] | None = None) -> onnx.ModelProto:
    """Return y = s w + s w', where s is relu(x), sliced by `cut` (axis, first, end) if given."""
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((DEPTH, COLUMNS)).astype(np.float32) for name in ("w", "v")}
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    nodes = [helper.make_node("Relu", ["x"], ["whole"])]
    if cut:
        constants += [numpy_helper.from_array(np.array([number]), name)
                      for name, number in zip(("axis", "first", "end"), cut, strict=True)]
        nodes.append(helper.make_node("Slice", ["whole", "first", "end", "axis"], ["part"]))
    source = "part" if cut else "whole"
    nodes += [helper.make_node("MatMul", [source, "w"], ["left"]), helper.make_node("Relu", ["left"], ["residual"]),
              helper.make_node("MatMul", [source, "v"], ["right"]),
              helper.make_node("Add", ["residual", "right"], ["y"])]
    graph = helper.make_graph(nodes, "layers", [helper.make_tensor_value_info("x", FLOAT, shape)],
                              [helper.make_tensor_value_info("y", FLOAT, None)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def products(engine: Engine) -> list[Step]:
    return [step for step in engine.plan.machine.steps if step.tactic.startswith("contraction")]


def answers(model: onnx.ModelProto, shape: tuple[int, ...], folder: Path, precision: str, **options: Any) -> Engine:
    """Compare the engine with ONNX Runtime, on one thread and on two, and return it."""
    feeds = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    engine = built(model, folder, feeds if precision == "int8" else None, precision=precision, **options)
    expected = run_onnx(model, feeds)["y"]
    for runner in (engine, Engine(engine.plan, threads=2)):
        got = runner.run(feeds)["y"]
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() < TOLERANCE[precision] * np.abs(expected).max()
    return engine


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("shape", [(35, DEPTH), (5, 7, DEPTH), (35, 1, DEPTH)], ids=str)
def test_rows_of_a_fixed_extent_are_rows_of_the_kernel(shape: tuple[int, ...], precision: str, tmp_path: Path) -> None:
    """If each row were an item, the grid would have 35 rows."""
    steps = products(answers(layers(shape), shape, tmp_path, precision, max_batch=None))
    assert steps and all(step.rows_per_item == 0 and step.rows < 20 for step in steps)


@pytest.mark.parametrize("shape, cut", [((4, 6, 5, DEPTH), (1, 1, 3)), ((4, 3, 6, DEPTH), (2, 1, 3))], ids=str)
def test_rows_with_gaps_between_them_are_found(shape: tuple[int, ...], cut: tuple[int, int, int],
                                               tmp_path: Path) -> None:
    assert products(answers(layers(shape, cut), shape, tmp_path, "fp32", max_batch=None))


def test_a_vector_is_one_row(tmp_path: Path) -> None:
    step, *_ = products(answers(layers((DEPTH,)), (DEPTH,), tmp_path, "fp32", max_batch=None))
    assert step.rows == 1


@pytest.mark.parametrize("ones, precision", [(70_000, "fp32"), (60_000, "int8")])
def test_int8_is_for_sums_that_an_integer_holds(ones: int, precision: str, tmp_path: Path) -> None:
    """70,000 * 255 * 127 exceeds 2**31; with 10,000 negative weights the sums stay below it."""
    weights = np.ones((70_000, 2), np.float32)
    weights[ones:] = -1
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "deep",
                              [helper.make_tensor_value_info("x", FLOAT, (1, 70_000))],
                              [helper.make_tensor_value_info("y", FLOAT, None)],
                              [numpy_helper.from_array(weights, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {"x": np.ones((1, 70_000), np.float32)}
    engine = built(model, tmp_path, feeds, precision="int8", max_batch=None)
    assert products(engine)[0].precision == precision
    np.testing.assert_allclose(engine.run(feeds)["y"], weights.sum(axis=0)[None], rtol=1e-2)


@pytest.mark.parametrize("precision", TOLERANCE)
def test_rows_of_a_batch_are_those_that_it_has(precision: str, tmp_path: Path) -> None:
    step, *_ = products(answers(layers(("batch", DEPTH)), (MAX_BATCH, DEPTH), tmp_path, precision))
    assert step.rows_per_item == 1


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 128, 1), (6, 64, 8), (7, 100, 2), (1, 33, 300)])
def test_every_number_of_items_is_computed_whatever_tiles_their_rows_are_cut_into(
        rows: int, depth: int, columns: int) -> None:
    """Tiles have up to 24 rows of the batch; the tail is known at run time only."""
    random = np.random.default_rng(2)
    weights = random.standard_normal((depth, columns)).astype(np.float32)
    model = small_model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ["N", rows, depth]}, ["y"],
                        {"w": weights})
    engine = build_engine(model, cache=False, timing=False).engine()
    x = random.standard_normal((33, rows, depth)).astype(np.float32)
    for items in range(1, 34):
        np.testing.assert_allclose(engine.run({"x": x[:items]})["y"], x[:items] @ weights, rtol=1e-3, atol=1e-3)
