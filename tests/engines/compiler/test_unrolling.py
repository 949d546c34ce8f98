"""Loops and Scans of few steps are unrolled; others stay."""
from __future__ import annotations

import numpy as np
import onnx
import pytest

from infer_server.engines import build_engine
from infer_server.engines.frontend.cutting import unrolling
from infer_server.engines.frontend.cutting.unrolling import with_steps_unrolled
from infer_server.engines.frontend.onnx_file import INTEGER_STATES, read_model
from infer_server.engines.frontend.onnx_import import node_of
from infer_server.engines.ir.graph import Array
from tests.engines.compiler import program_models as models
from tests.engines.compiler.open_models import by_onnx_runtime, node, random
from tests.engines.compiler.program_models import BOOL, FLOAT, INT64, region
from tests.engines.compiler.small_models import small_model

NUMBERS = {"m": np.array(3), "yes": np.array(True), "no": np.array(False), "one": np.array([1])}


def loop(most: str = "m", first: str = "yes", condition: str = "going", twice: bool = False) -> onnx.ModelProto:
    """Return a Loop with a state that grows by a row at each step, one made of the row, and all rows as outputs.

    twice: a second such Loop reads the first one's result.
    """
    body = region("body", [
        node("Identity", condition, "again"), node("Identity", "again", "goes_on"), node("Cast", "i", "f", to=1),
        node("Add", "f x", "row"), node("Concat", "b row", "longer", axis=0), node("Mul", "row scale", "made")],
        [("i", INT64, []), ("going", BOOL, []), ("a", FLOAT, [1, 5]), ("b", FLOAT, ["n", 5])],
        "goes_on made longer row", {"goes_on": BOOL})
    body.initializer.append(onnx.numpy_helper.from_array(random(5), "scale"))
    loops = [node("Loop", f"{most} {first} x x", "y z rows", body=body),
             node("Loop", f"{most} {first} y x", "y2 z2 rows2", body=body)]
    outputs = ["y", "z", "rows", *["y2", "z2", "rows2"] * twice]
    return small_model(loops[:1 + twice], {"x": [1, 5]}, outputs, NUMBERS)


def scan() -> onnx.ModelProto:
    """Return running sums of two sequences of 4, in all directions."""
    body = region("body", [node("Add", "sum a", "c"), node("Sub", "c b", "next"), node("Mul", "next next", "square"),
                           node("Neg", "next", "less")],
                  [("sum", FLOAT, [3]), ("a", FLOAT, [3]), ("b", FLOAT, [3])], "next square less")
    return small_model([node("Scan", "start x z", "y squares sums", body=body, num_scan_inputs=2,
                              scan_input_axes=[0, 1], scan_input_directions=[1, 0], scan_output_axes=[0, -1],
                              scan_output_directions=[1, 0])],
                       {"start": [3], "x": [4, 3], "z": [3, 4]}, ["y", "squares", "sums"])


MODELS = {
    "a Loop whose condition never changes": loop(), "a Loop without a first condition": loop(first="-"),
    "a Loop that always goes on": loop(condition="yes"),
    "a Scan": scan(),
    "two that share a body": loop(twice=True)}


def unrolled(model: onnx.ModelProto) -> onnx.ModelProto:
    source = with_steps_unrolled(read_model(model))
    whole = onnx.ModelProto()
    whole.CopyFrom(source.proto)
    whole.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in source.weights.items())
    return whole


def fed(model: onnx.ModelProto) -> dict[str, Array]:
    return {value.name: random(*(extent.dim_value for extent in value.type.tensor_type.shape.dim), seed=i)
            for i, value in enumerate(model.graph.input)}


@pytest.mark.parametrize("name", MODELS)
def test_the_steps_one_after_the_other_give_what_the_loop_gave(name: str) -> None:
    model, feed = MODELS[name], fed(MODELS[name])
    flat = unrolled(model)
    assert not {"Loop", "Scan"} & {one.op_type for one in flat.graph.node}
    for (output, got), want in zip(by_onnx_runtime(flat, feed).items(), by_onnx_runtime(model, feed).values(),
                                   strict=True):
        np.testing.assert_array_equal(got, want, err_msg=output, strict=True)


def test_tensors_with_names_that_are_made_for_steps_keep_their_values() -> None:
    """The names number, going and y.0.number are also generated; d is stacked twice."""
    body = region("body", [
        node("Identity", "c", "goes_on"), node("Mul", "a a", "number"), node("Tanh", "a", "going"),
        node("Cast", "i", "f", to=1), node("Add", "number f", "g"), node("Add", "g going", "b"),
        node("Sub", "b x", "d")],
        [("i", INT64, []), ("c", BOOL, []), ("a", FLOAT, [1, 5])], "goes_on b d d", {"goes_on": BOOL})
    model = small_model([node("Loop", "m - x", "y s t", body=body), node("Neg", "y", "y.0.number"),
                         node("Abs", "y.0.number", "y.1.b")], {"x": [1, 5]}, ["y.1.b", "y", "s", "t"], NUMBERS)
    flat = unrolled(model)
    names = [name for one in flat.graph.node for name in one.output]
    assert len(names) == len(set(names)) and "Loop" not in {one.op_type for one in flat.graph.node}
    for name, want in by_onnx_runtime(model, fed(model)).items():
        np.testing.assert_array_equal(by_onnx_runtime(flat, fed(model))[name], want, err_msg=name)


def test_the_model_of_the_steps_has_all_but_the_loop_of_the_model_before() -> None:
    model = scan()
    onnx.helper.set_model_props(model, {INTEGER_STATES: '["cells"]'})
    source = read_model(model)
    source.nodes.append(node_of("m", node("Neg", "x", "y")))
    flat = with_steps_unrolled(source)
    assert flat.integer_states == {"cells"}
    assert not flat.nodes                       # those are of the model before


def test_a_model_of_such_loops_is_a_graph_like_any_other() -> None:
    model = scan()
    engine = build_engine(model, cache=False, timing=False).engine()
    assert engine.plan.program is None
    for name, want in by_onnx_runtime(model, fed(model)).items():
        np.testing.assert_allclose(engine.run(fed(model))[name], want, 1e-5, 1e-5)


@pytest.mark.parametrize("model", [
    loop("-"), loop(condition="no"), loop(first="no"), models.running_sum(), models.scanned(), models.until_large()],
    ids=["no limit", "it stops", "it does not begin", "as many as rows", "an open extent", "an If in it"])
def test_a_loop_of_unknown_steps_stays_one(model: onnx.ModelProto) -> None:
    source = read_model(model)
    assert with_steps_unrolled(source) is source


def test_a_constant_of_any_form_counts_the_steps() -> None:
    model = loop("count")
    model.graph.node.insert(0, node("Constant", "", "count", value_int=3))
    flat, feed = unrolled(model), fed(model)
    assert "Loop" not in {one.op_type for one in flat.graph.node}
    for name, want in by_onnx_runtime(model, feed).items():
        np.testing.assert_array_equal(by_onnx_runtime(flat, feed)[name], want, err_msg=name)


def test_too_many_steps_stay_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    source = read_model(scan())
    monkeypatch.setattr(unrolling, "MOST_NODES", 15)
    assert with_steps_unrolled(source) is source
    monkeypatch.setattr(unrolling, "MOST_NODES", 16)
    assert with_steps_unrolled(source) is not source
    monkeypatch.setattr(unrolling, "MOST_STEPS", 3)
    assert with_steps_unrolled(source) is source
