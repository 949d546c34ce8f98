"""An If with a known condition is replaced by the branch that it takes."""
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.engines.errors import ModelError, UnknownValueError
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ops.reference import run


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"{op} {outputs}", **attrs)


def branch(nodes, outputs, constants=None):
    return helper.make_graph(nodes, "branch", [], [helper.make_empty_tensor_value_info(o) for o in outputs.split()],
                             [numpy_helper.from_array(np.asarray(a), k) for k, a in (constants or {}).items()])


def model(nodes, constants=None, outputs="y", shape=("N", 4)):
    """Return a model with inputs x, float32 of `shape`, and on, bool []."""
    graph = helper.make_graph(
        nodes, "m", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
                     helper.make_tensor_value_info("on", TensorProto.BOOL, [])],
        [helper.make_empty_tensor_value_info(o) for o in outputs.split()],
        [numpy_helper.from_array(np.asarray(a), k) for k, a in (constants or {}).items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def made(proto, on, x=None, **options):
    graph = graph_from_onnx(proto, constants={"on": on}, **options)
    return run(graph, {"x": np.float32([[1, -2, 3, -4]]) if x is None else x})


def choice(then, other, **more):
    return node("If", "on", "y", then_branch=then, else_branch=other, **more)


@pytest.mark.parametrize("on, expected", [(True, [-1, 2, -3, 4]), (False, [2, -4, 6, -8])])
def test_the_branch_of_a_known_condition_is_a_part_of_the_graph(on, expected):
    """The branch reads tensors of the outer graph, and has its own constants."""
    proto = model([choice(branch([node("Neg", "x", "a")], "a"), branch([node("Mul", "x two", "b")], "b",
                                                                     {"two": np.float32(2)}))])
    np.testing.assert_array_equal(made(proto, on)["y"], [expected])


@pytest.mark.parametrize("extent, factor", [(4, 3), (5, 1)])
def test_a_condition_may_follow_from_shapes(extent, factor):
    shape = [node("Shape", "x", "s"), node("Gather", "s one", "n"), node("Equal", "n four", "is_four")]
    taken = node("If", "is_four", "y", then_branch=branch([node("Mul", "x three", "a")], "a"),
                 else_branch=branch([node("Identity", "x", "b")], "b"))
    constants = {"one": 1, "four": 4, "three": np.float32(3)}
    proto = model([*shape, taken], constants, shape=("N", extent))
    ones = np.ones((2, extent), np.float32)
    np.testing.assert_array_equal(made(proto, True, ones)["y"], factor * ones)


def test_branches_may_stand_in_branches_and_use_the_same_names():
    inner = node("If", "on", "t", then_branch=branch([node("Neg", "a", "b")], "b"),
                 else_branch=branch([node("Abs", "a", "b")], "b"))
    proto = model([choice(branch([node("Mul", "x x", "a"), inner], "t"), branch([node("Abs", "x", "b")], "b")),
                   node("If", "on", "z", then_branch=branch([node("Add", "y y", "a")], "a"),
                        else_branch=branch([node("Abs", "y", "b")], "b"))], outputs="y z")
    results = made(proto, True)
    np.testing.assert_array_equal(results["y"], [[-1, -4, -9, -16]])
    np.testing.assert_array_equal(results["z"], [[-2, -8, -18, -32]])


def test_a_tensor_of_a_branch_may_have_the_name_of_one_that_is_made_later():
    proto = model([choice(branch([node("Neg", "x", "later")], "later"), branch([node("Abs", "x", "b")], "b")),
                   node("Abs", "y", "later")], outputs="y later")
    results = made(proto, True)
    np.testing.assert_array_equal(results["y"], [[-1, 2, -3, 4]])
    np.testing.assert_array_equal(results["later"], [[1, 2, 3, 4]])


def test_a_branch_in_a_branch_reads_a_tensor_that_got_another_name():
    inner = node("If", "on", "t", then_branch=branch([node("Neg", "later", "b")], "b"), else_branch=branch([], "later"))
    proto = model([choice(branch([node("Mul", "x x", "later"), inner], "t"), branch([], "x")),
                   node("Abs", "x", "later")], outputs="y later")
    results = made(proto, True)
    np.testing.assert_array_equal(results["y"], [[-1, -4, -9, -16]])
    np.testing.assert_array_equal(results["later"], [[1, 2, 3, 4]])


def test_a_branch_may_hand_out_what_is_around_it_and_one_tensor_twice():
    proto = model([node("If", "on", "y z", then_branch=branch([], "x x"), else_branch=branch([], "x x"))],
                  outputs="y z")
    results = made(proto, True)
    np.testing.assert_array_equal(results["y"], results["z"])


def test_an_operator_of_the_other_branch_does_not_matter():
    unknown = helper.make_node("Foo", ["x"], ["b"], domain="custom")
    proto = model([choice(branch([node("Neg", "x", "a")], "a"), branch([unknown], "b"))])
    np.testing.assert_array_equal(made(proto, True)["y"], [[-1, 2, -3, 4]])
    with pytest.raises(ModelError, match=r"not supported: custom.Foo"):
        made(proto, False)


def test_a_condition_that_is_not_known_is_asked_for():
    proto = model([choice(branch([node("Neg", "x", "a")], "a"), branch([node("Abs", "x", "b")], "b"))])
    with pytest.raises(UnknownValueError,
                       match=r"node 'If y' \(If\): the condition 'on' is not known at import; 'on' must "
                                                r"be known .* --constant on=VALUE") as error:
        graph_from_onnx(proto)
    assert error.value.inputs == ("on",)


@pytest.mark.parametrize("proto, message", [
    (model([node("If", "x", "y", then_branch=branch([], "x"), else_branch=branch([], "x"))], shape=(0,)),
     r"the condition is float32\[0\], but has to be a single bool"),
    (model([node("If", "on", "y", then_branch=branch([], "x"))]), "the attribute else_branch is missing"),
    (model([choice(branch([], "x"), branch([], "x x"))]), "else_branch has 2 outputs, but the node has 1"),
    (model([choice(branch([], "x"), branch([], "nowhere"))]), "the branch's output 'nowhere' is never produced"),
    (model([choice(branch([], "x"), branch([node("Neg", "nowhere", "a")], "a"))]), "reads 'nowhere'"),
    (model([choice(branch([], "x"), branch([node("Neg", "x", "a"), node("Abs", "x", "a")], "a"))]), "produced twice"),
])
def test_a_branch_that_does_not_fit_is_refused(proto, message):
    with pytest.raises(ModelError, match=message):
        graph_from_onnx(proto, constants={"on": False})
