"""A symbolic leading extent that is not a batch of independent items is never run in slices."""
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from infer_server.engines.compiler.build import build_engine
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import InputError, ModelError
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.engines.runtime.engine import Engine

FLOAT = TensorProto.FLOAT


def model(nodes, inputs, outputs, **constants):
    def infos(shapes):
        return [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in shapes.items()]

    graph = helper.make_graph(nodes, "g", infos(inputs), infos(outputs),
                              [numpy_helper.from_array(value, name) for name, value in constants.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def share_of_the_sum(columns=4):
    """Return y = x / the sum of all x, in which every item depends on all items."""
    return model([helper.make_node("ReduceSum", ["x", "first"], ["s"]), helper.make_node("Div", ["x", "s"], ["y"])],
                 {"x": ["n", columns]}, {"y": ["n", columns]}, first=np.array([0], np.int64))


def built(proto, **config):
    builder = Builder(BuildConfig(timing=False, **config))
    return builder, builder.plan(builder.graph(proto))


def random(*shape):
    return np.random.default_rng(7).random(shape, np.float32) + 1


def test_a_batch_whose_items_depend_on_each_other_is_run_whole(tmp_path):
    builder, plan = built(share_of_the_sum(), max_batch=8)
    assert "ReduceSum" in plan.dependence and "neither cut nor merged" in builder.notices[0]
    write_plan(plan, tmp_path / "m.plan")
    engine = Engine(read_plan(tmp_path / "m.plan"))
    assert "ReduceSum" in engine.dependence
    for items in (1, 3, 8):
        x = random(items, 4)
        np.testing.assert_allclose(engine.run({"x": x})["y"], x / x.sum(axis=0), rtol=1e-6)
    with pytest.raises(InputError, match="--max-batch 9"):
        engine.run({"x": random(9, 4)})


@pytest.mark.parametrize("columns", [4, "columns"])
def test_more_items_that_depend_on_each_other_than_a_plan_is_for_are_compiled_for(columns):
    build = build_engine(share_of_the_sum(columns), timing=False, max_batch=8)
    engine = build.engine()
    for items in (3, 9, 40, 12):
        x = random(items, 4)
        np.testing.assert_allclose(engine.run({"x": x})["y"], x / x.sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize(("item", "compiled"), [(np.array(0), True), (np.array([0]), True), (np.array(1), False)])
def test_the_first_item_which_each_batch_has_is_taken_by_a_kernel(item, compiled):
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Gather", ["r", "item"], ["p"]),
             helper.make_node("Exp", ["p"], ["y"])]
    build = build_engine(model(nodes, {"x": ["n", 3, 5]}, {"y": [*item.shape, 3, 5]}, item=item), timing=False,
                         max_batch=4)
    assert (not build.coverage.by_reference) == compiled
    for items in (2, 4):
        x = random(items, 3, 5)
        np.testing.assert_allclose(build.engine().run({"x": x})["y"], np.exp(x[item]), rtol=1e-5)


def test_independent_items_are_run_in_slices():
    _, plan = built(model([helper.make_node("Relu", ["x"], ["y"])], {"x": ["n", 4]}, {"y": ["n", 4]}), max_batch=8)
    x = random(19, 4)
    assert plan.dependence == ""
    np.testing.assert_array_equal(Engine(plan).run({"x": x})["y"], x)


def test_different_symbols_are_different_extents():
    two = model([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Relu", ["a"], ["b"])],
                {"x": ["n", 4], "a": ["m", 4]}, {"y": ["n", 4], "b": ["m", 4]})
    with pytest.raises(ModelError, match="--shape x:batchx4 --shape a:batchx4"):
        built(two)
    _, plan = built(two, shapes={"x": (None, 4), "a": (None, 4)})
    assert plan.max_batch and plan.dependence == ""
    _, plan = built(two, shapes={"a": (3, 4)})
    assert [io.shape for io in plan.inputs] == [("batch", 4), (3, 4)]


def test_one_symbol_is_one_extent_on_every_axis():
    distances = model([helper.make_node("MatMul", ["x", "d"], ["y"])],
                      {"x": [1, "atoms"], "d": ["atoms", "atoms"]}, {"y": [1, "atoms"]})
    _, plan = built(distances, shapes={"x": (1, 5)})
    assert [io.shape for io in plan.inputs] == [(1, 5), (5, 5)]
    with pytest.raises(ModelError, match="the extent 'atoms' has two values"):
        built(distances, shapes={"x": (1, 5), "d": (6, 6)})


@pytest.mark.parametrize("name, nodes, shapes, constants", [
    ("a Squeeze without axes", [helper.make_node("Squeeze", ["x"], ["y"])], {"x": ["n", 1, 2]}, {}),
    ("a constant of three rows", [helper.make_node("Add", ["x", "c"], ["y"])], {"x": ["n", 4]}, {"c": random(3, 4)}),
    ("all pairs of items", [helper.make_node("Transpose", ["x"], ["t"]), helper.make_node("MatMul", ["x", "t"], ["y"])],
     {"x": ["n", 4]}, {}),
    ("more rows than items", [helper.make_node("Concat", ["x", "c"], ["y"], axis=0)], {"x": ["n", 4]},
     {"c": random(3, 4)})])
def test_what_depends_on_the_number_of_items_is_specialised_for_each(name, nodes, shapes, constants):
    proto = model(nodes, shapes, {"y": None}, **constants)
    build = build_engine(proto, timing=False, cache=False)
    engine = build.engine()
    assert build.plan.max_batch == 0 and "for the batch cannot be left open" in build.notices[0], name
    for items in (1, 3):
        x = random(items, *shapes["x"][1:])
        want, = ReferenceEvaluator(proto).run(None, {"x": x})
        np.testing.assert_allclose(engine.run({"x": x})["y"], want, rtol=1e-6, strict=True)
    with pytest.raises(InputError, match="the model takes"):
        engine.run({"x": random(3, *shapes["x"][1:], 1)})


def test_a_recurrent_state_of_fixed_extents_is_not_stretched_over_the_batch():
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
             helper.make_node("RNN", ["t", "w", "r", "", "", "h"], ["", "y"], hidden_size=6)]
    proto = model(nodes, {"x": ["n", 5, 3], "h": [1, 1, 6]}, {"y": None}, w=random(1, 6, 3), r=random(1, 6, 6))
    plan = build_engine(proto, timing=False, cache=False).plan
    assert plan.max_batch == 0 and plan.inputs[0].shape == (1, 5, 3)
    for asked in ({"max_batch": 4}, {"shapes": {"x": (-1, 5, 3)}}, {"shapes": {"x": (None, 5, 3)}}):
        with pytest.raises(ModelError, match="initial state"):
            build_engine(proto, timing=False, cache=False, **asked)
