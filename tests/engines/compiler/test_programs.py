"""Models that are not a single graph run as programs, with ONNX Runtime's results."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from infer_server.calibration import Calibration
from infer_server.engines import build_engine, load_engine
from infer_server.engines.errors import InputError, PlanError, PlanTargetError
from infer_server.engines.frontend.cutting.cut import cut
from infer_server.engines.frontend.onnx_file import read_model
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.coverage import coverage_of
from infer_server.engines.plan.file import read_plan
from infer_server.engines.plan.symbolic.encoding import decode
from infer_server.engines.runtime import iteration
from infer_server.engines.runtime.iteration import BoundBody
from infer_server.engines.runtime.load.create import engine_of
from infer_server.engines.runtime.load.options import LoadOptions
from tests.engines.compiler import program_models as models
from tests.engines.compiler.open_models import by_onnx_runtime, node, random
from tests.engines.compiler.small_models import small_model


def fed(*shape: int, seed: int = 3) -> dict[str, Array]:
    return {"x": random(*shape, seed=seed)}


def carried_past(rows: int, width: int = 3) -> dict[str, Array]:
    return {"x": random(rows, 5), "a": random(width, seed=1), "b": random(width, seed=2)}


CASES = {
    "a Loop over steps": (models.running_sum(), [fed(4, 5), fed(1, 5), fed(7, 5)]),
    "a product of rows in a Loop and in a Scan": (models.recurrent(), [fed(4, 1, 6), fed(1, 1, 6)]),
    "a Loop that exchanges its states": (models.exchanged(), [fed(4, 5), fed(1, 5), fed(40, 5), fed(4, 5, seed=9)]),
    "a Loop that ends by what it carries": (models.asked(), [{"x": np.full(3, n, np.float32)} for n in (0.3, 1, 5)]),
    "a Loop whose states no kernel reads": (models.carried(), [carried_past(2), carried_past(2, 5), carried_past(3)]),
    "a Loop whose state grows": (models.grown(), [fed(3, 5)]),
    "a Loop with constants": (models.first_numbers(), [fed(3, 5)]),
    "an If in a Loop": (models.until_large(), [{"x": np.full(n, 0.5, np.float32)} for n in (1, 6)]),
    "a Scan from behind": (models.scanned(), [fed(3, 4), fed(3, 1)]),
    "rows that data choose": (models.chosen_rows(), [fed(9, 6), fed(5, 6, seed=8)]),
    "no row at all": (models.chosen_rows(), [{"x": -np.ones((3, 6), np.float32)}]),
    "a detector": (models.detector(), [fed(1, 12, 8), fed(1, 30, 8)]),
    "a sequence": (models.collected(), [fed(3, 2, 6), fed(1, 2, 6)]),
    "a length that is computed": (models.measured(), [fed(3, 4), fed(6, 4, seed=9)])}


def built(model: onnx.ModelProto, **options: Any) -> Any:
    return build_engine(model, cache=False, timing=False, **options)


def assert_right(engine: Any, model: onnx.ModelProto, feed: dict[str, Array]) -> None:
    made = engine.run(feed)
    for name, expected in by_onnx_runtime(model, feed).items():
        np.testing.assert_allclose(made[name], expected, rtol=1e-4, atol=1e-5, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_a_program_is_right_at_every_shape(case: str, tmp_path: Path) -> None:
    model, feeds = CASES[case]
    build = built(model)
    assert not build.notices
    assert case != "a detector" or not coverage_of(build.plan).by_reference
    build.save(tmp_path / "m.plan")
    engine = load_engine(tmp_path / "m.plan", cache=False)
    for feed in feeds:
        assert_right(engine, model, feed)


def test_segments_have_symbolic_plans_in_the_file_in_which_extents_of_weights_are_fixed() -> None:
    model, feeds = CASES["a detector"]
    plan = built(model).plan
    symbolics = [one for segment in plan.program.segments for part in segment.plans
                 for one in decode(part.open_part.symbolic, part)]
    assert [(one.names, one.fixed) for one in symbolics] == [
        (("all.0",), {"chosen.0": 6, "chosen.1": 3, "all.1": 4})]
    without = build_engine(model, cache=False, timing=False, symbolic_plans=False).plan
    assert not any(part.open_part.symbolic for segment in without.program.segments for part in segment.plans)


def wide_sum() -> onnx.ModelProto:
    """Return a Loop that adds x to a state of any width n times and stacks the states."""
    body = helper.make_graph(
        [node("Identity", "going", "goes_on"), node("Add", "sum x", "next"), node("Identity", "next", "row")], "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []),
         helper.make_tensor_value_info("going", TensorProto.BOOL, []),
         helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["width"])],
        [helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
         helper.make_tensor_value_info("next", TensorProto.FLOAT, ["width"]),
         helper.make_tensor_value_info("row", TensorProto.FLOAT, ["width"])])
    model = small_model([node("Loop", "n - x", "y rows", body=body)], {"x": ["width"]}, ["y", "rows"], {})
    model.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT64, []))
    return model


def test_a_body_is_bound_to_the_shapes_that_came_before_or_to_others() -> None:
    model = wide_sum()
    engine = engine_of(built(model).plan, LoadOptions(specialise="wait"))
    for seed, (width, steps) in enumerate(((7, 2), (7, 3), (4, 2), (7, 1), (4, 4), (4, 2))):
        assert_right(engine, model, {"x": random(width, seed=seed), "n": np.array(steps)})


def test_an_extent_declared_below_0_is_open() -> None:
    model, feed = models.running_sum(), fed(4, 5)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert_right(built(model).engine(), model, feed)


def test_weights_that_a_loop_carries_are_constants_of_its_body() -> None:
    plan = built(models.running_sum()).plan
    (loop,) = (one for one in plan.program.main.instructions if one.op == "Loop")
    (step,) = (one for one in loop.regions[0].instructions if not one.op)
    assert "w" in plan.program.segments[step.segment].reads and len(loop.inputs) == 3


@pytest.mark.parametrize(("model", "expected"), [
    (models.running_sum(), True), (models.exchanged(), True), (models.scanned(), True), (models.grown(), False)])
def test_a_body_that_is_one_segment_is_repeated_in_place(
        model: onnx.ModelProto, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that grow cannot be kept in place."""
    found, run = [], BoundBody.run

    def spied(*given: Any) -> bool:
        found.append(run(*given))
        return found[-1]

    monkeypatch.setattr(BoundBody, "run", spied)
    built(model)
    assert set(found) == {expected}


def test_states_that_are_stacked_as_they_come_keep_their_type() -> None:
    """The type is bfloat16, which is an integer in memory, and is read after the Loop."""
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    sums = built(models.halves()).engine().run({"x": x})["all"]
    np.testing.assert_array_equal(sums, np.cumsum(x, axis=0) - x)


def test_products_of_rows_are_made_before_the_first_step() -> None:
    """Neighbouring operators move with them. Products with rows of a weight stay, since a step chooses one of many."""
    def operators(model: onnx.ModelProto) -> tuple[list[str], list[list[str]]]:
        found = cut(read_model(model))
        made = [[one.op_type for one in onnx.load_from_string(segment.model).graph.node] for segment in found.segments]
        inner = {one.segment for outer in found.main.instructions for body in outer.regions
                 for one in body.instructions}
        return [op for i, ops in enumerate(made) if i not in inner for op in ops], [
            ops for i, ops in enumerate(made) if i in inner]

    outer, (loop, scan) = operators(models.recurrent())
    assert outer.count("MatMul") == outer.count("Relu") == outer.count("Add") == 2
    assert scan == ["MatMul", "Add", "Tanh", "Identity"] and loop[-4:] == scan
    table = models.recurrent()
    table.graph.initializer.append(onnx.numpy_helper.from_array(random(9, 1, 6), "table"))
    table.graph.node[2].attribute[0].g.node[1].input[0] = "table"
    assert "Relu" in operators(table)[1][0]


def test_the_segments_of_a_program_are_calibrated_by_what_they_are_fed() -> None:
    """Segments in a Loop are calibrated on all steps; items may have different shapes."""
    model = models.chosen_patches()
    data = [{"x": random(1, 3, height, 8, seed=height)} for height in (6, 6, 9)]
    build = built(model, precision="int8", calibration=Calibration(data, "minmax"))
    plans = [plan for segment in build.plan.program.segments for plan in segment.plans]
    arithmetic = [step.precision for plan in plans for step in plan.machine.steps if step.macs]
    assert arithmetic.count("int8") == 3 and {*arithmetic} == {"int8"}       # Conv, MatMul, and MatMul in the Loop
    assert not [notice for notice in build.notices if "stays in float" in notice]
    engine = build.engine()
    for feed, error in (data[0], 0.03), (fed(1, 3, 12, 8), 0.1):        # one of the data, and one of another shape
        expected = by_onnx_runtime(model, feed)["y"]
        assert np.linalg.norm(engine.run(feed)["y"] - expected) < error * np.linalg.norm(expected)


def test_a_segment_in_which_nothing_is_to_be_quantised_stays_in_float() -> None:
    model, data = models.detector(), [fed(1, 12, 8)]
    engine = built(model, precision="int8", calibration=Calibration(data, "minmax")).engine()
    expected = by_onnx_runtime(model, data[0])["y"]
    np.testing.assert_allclose(engine.run(data[0])["y"], expected, atol=0.05)


def test_what_a_backend_does_not_select_is_selected_by_the_host() -> None:
    model = read_model(models.detector())
    found = [[one.op for one in cut(model, bounded=bounded).main.instructions] for bounded in (True, False)]
    assert found == [["", "FirstRows", ""], ["", "NonMaxSuppression", ""]]


@pytest.mark.parametrize(("model", "feed", "changed", "message"), [
    (models.until_large(), {"x": np.zeros(3, np.float32)}, {"MOST_STEPS": 1000}, "has not ended after 1024 steps"),
    (models.running_sum(), fed(300, 5), {"MOST_STEPS": 200}, "has not ended after 256 steps"),
    (models.running_sum(), fed(300, 5), {"memory_limit": lambda: 10_000}, "its first 256 steps have made takes more"),
    (models.collected(), fed(300, 2, 6), {"memory_limit": lambda: 10_000}, "its first 256 steps have made takes more"),
    (models.exchanged(), fed(0, 5), {}, "gathers a row that is not there")])
def test_a_loop_that_leads_nowhere_is_an_error(model: onnx.ModelProto, feed: dict[str, Array], changed: dict[str, Any],
                                               message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = built(model).engine()
    for name, value in changed.items():
        monkeypatch.setattr(iteration, name, value)
    with pytest.raises(PlanError, match=message):
        engine.run(feed)


def test_values_are_dropped_when_nobody_needs_them() -> None:
    main = built(models.chosen_rows()).plan.program.main
    drops = [set(instruction.drops) for instruction in main.instructions]
    assert [one.op for one in main.instructions] == ["", "NonZero", ""]
    assert drops == [set(), {"positive"}, {"where", "x"}]


def test_what_follows_from_shapes_alone_is_no_program() -> None:
    """Exporters write the indices of all elements this way."""
    model = small_model([node("Shape", "x", "shape"), node("ConstantOfShape", "shape", "ones"),
                         node("NonZero", "ones", "all"), node("Transpose", "all", "places", perm=[1, 0]),
                         node("GatherND", "x places", "y")],
                        {"x": ["T", 4]}, ["y"])
    model.graph.node[1].attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(
        np.array([1], np.int64))))
    plan = built(model).plan
    assert plan.program is None and plan.open is not None


def test_a_node_that_no_segment_can_have_is_left_to_the_host() -> None:
    """A mask of run-time size decides a shape, which only the compiler finds out."""
    model = small_model([node("Cast", "x", "i", to=models.INT64), node("Reshape", "v i", "r"), node("Exp", "r", "y")],
                        {"x": ["n"], "v": [6, 4]}, ["y"])
    build = built(model)
    assert [one.op for one in build.plan.program.main.instructions] == ["", "Reshape", ""]
    assert_right(build.engine(), model, {"x": np.array([3, 8], np.float32), "v": random(6, 4)})


def test_a_program_for_another_target_has_only_segments_for_it() -> None:
    plan = build_engine(models.chosen_rows(), timing=False, target="portable").plan
    assert {one.machine.target for segment in plan.program.segments for one in segment.plans} == {"portable"}
    plan = build_engine(models.chosen_rows(), timing=False, target="avx512_vnni").plan
    assert {one.machine.target for segment in plan.program.segments for one in segment.plans} == {"avx512_vnni"}


def test_a_stripped_program_runs_what_it_was_tried_on(tmp_path: Path) -> None:
    model = models.scanned()
    build = built(model)
    build.save(tmp_path / "m.plan", strip=True)
    assert not any(segment.model for segment in read_plan(tmp_path / "m.plan").program.segments)
    engine = load_engine(tmp_path / "m.plan", cache=False)
    assert_right(engine, model, fed(3, 128))
    shaped = engine_of(built(models.measured()).plan.strip())
    with pytest.raises(PlanTargetError, match="stripped"):
        shaped.run(fed(3, 4))


def test_a_context_holds_the_inputs_until_the_program_runs() -> None:
    model = models.chosen_rows()
    context = built(model).engine().create_context()
    feed = fed(9, 6)
    here = context.at({"x": (9, 6)})
    here.input("x")[...] = feed["x"]
    here.execute()
    np.testing.assert_allclose(here.output("y"), by_onnx_runtime(model, feed)["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("feed", "message"), [
    ({}, "input 'x' is missing"), ({"x": np.zeros((3, 6))}, "is float64, the model takes float32"),
    ({"x": np.zeros((3, 5), np.float32)}, r"has shape \[3, 5\]"),
    ({"x": np.zeros((3, 6), np.float32), "z": np.zeros(3)}, "no input 'z'")])
def test_feeds_that_do_not_fit_are_refused(feed: dict[str, Array], message: str) -> None:
    """Engines refuse them before and after they have run feeds that fit."""
    engine = built(models.chosen_rows()).engine()
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            engine.run(feed)
        assert_right(engine, models.chosen_rows(), fed(3, 6))


def test_names_of_classes_are_given_out_as_objects() -> None:
    classifier = helper.make_node(
        "LinearClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", coefficients=[1.0, 0.0, 0.0, 1.0],
        intercepts=[0.0, 0.0], classlabels_strings=["a cat", "a dog"])
    outputs = [helper.make_tensor_value_info("label", TensorProto.STRING, ["n"]),
               helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 2])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])
    graph = helper.make_graph([classifier], "g", [x], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)])
    engine = built(model).engine()
    label = engine.run({"x": np.array([[2, 1], [0, 3]], np.float32)})["label"]
    assert label.dtype == object and label.tolist() == ["a cat", "a dog"]
    by_host = [instruction.op for instruction in engine.executor.part.main.instructions if instruction.op]
    assert by_host == ["Gather"], "the classifier itself is compiled"
