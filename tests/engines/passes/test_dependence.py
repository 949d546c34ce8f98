"""Models whose items depend on each other must not be run in slices or merged batches."""
import numpy as np
import pytest

from infer_server.engines.errors import ModelError
from infer_server.engines.passes.dependence import with_dependence
from infer_server.engines.passes.layout.separate_batch import check_batch
from tests.engines.passes.build import Build


def dependence_of(net, *outputs):
    return with_dependence(net.graph(*outputs)).dependence


def test_a_network_of_images_keeps_its_items_apart():
    net = Build()
    x = net.input("x", 3, 8, 8)
    y = net("MaxPool", net("Relu", net.batch_norm(net.conv(x, 16, 3))), kernel_shape=(2, 2), strides=(2, 2))
    y = net("Flatten", net("GlobalAveragePool", y), axis=1)
    log = []
    assert with_dependence(net.graph(net("Softmax", net.linear(y, 10), axis=-1)), log).dependence == ""
    assert not log, "shown by analysis, not by trying"


@pytest.mark.parametrize("op, attrs", [
    ("ReduceSum", {"axes": (0,)}), ("ReduceMean", {}), ("ArgMax", {"axis": 0}), ("Softmax", {"axis": 0}),
    ("CumSum", {"axis": 0}), ("LpNormalization", {"axis": 0}), ("LogSoftmax", {"axis": 0})])
def test_what_works_along_the_axis_of_the_items_makes_them_depend_on_each_other(op, attrs):
    net = Build()
    y = net(op, net.input("x", 4), **attrs)
    assert op in dependence_of(net, y)


def test_a_reduction_along_another_axis_keeps_them_apart_and_moves_their_axis():
    net = Build()
    x = net("Transpose", net.input("x", 4, 6), perm=(1, 0, 2))         # [4, batch, 6]
    y = net("ReduceMax", x, axes=(0,), keepdims=0)                      # [batch, 6]
    assert dependence_of(net, net("Add", y, net.input("z", 6))) == ""


def test_one_item_times_another_is_found_in_a_product():
    net = Build()
    x = net.input("x", 4)
    y = net("MatMul", net("Transpose", x, perm=(1, 0)), x)              # [4, 4]: sums over the items
    assert "sums over the items" in dependence_of(net, y)


@pytest.mark.parametrize("left, right", [((3, 5), (5, 2)), ((5,), (5, 2)), ((3, 5), (5,))])
def test_products_item_by_item_keep_them_apart(left, right):
    net = Build()
    assert dependence_of(net, net("MatMul", net.input("x", *left), net.draw(*right))) == ""
    if len(right) > 1:
        assert dependence_of(net, net("MatMul", net.draw(*left), net.input("z", *right))) == ""


def test_a_vector_of_weights_times_items_of_matrices_drops_the_axis_of_rows():
    net = Build()
    y = net("MatMul", net.draw(5), net.input("x", 5, 2))                # [5] x [batch, 5, 2] = [batch, 2]
    assert dependence_of(net, net("Add", y, net.input("z", 2))) == ""


def test_a_number_that_counts_the_items_makes_them_depend_on_each_other():
    net = Build()
    x = net.input("x", 4)
    count = net("Cast", net("Gather", net("Shape", x), net.constant(np.array(0)), axis=0), to="float32")
    assert "number of items" in dependence_of(net, net("Div", x, count))


def test_operators_that_say_nothing_are_tried_on_three_items():
    apart, together = Build(), Build()
    fallback = {"onnx_opset": 17}
    log = []
    graph = with_dependence(apart.graph(apart("Hardmax", apart.input("x", 4, 4), **fallback)), log)
    assert graph.dependence == "" and "one by one" in str(log[0])
    y, scale, _ = together("DynamicQuantizeLinear", together.input("x", 4), count=3, **fallback)
    assert "differs" in dependence_of(together, together("DequantizeLinear", y, scale))


def test_a_tensor_that_is_no_batch_of_items_is_refused():
    net = Build()
    x = net.input("x", 4)
    with pytest.raises(ModelError, match="fix the batch"):
        check_batch(net.graph(net("Concat", x, net.draw(2, 4), axis=0)))


def scattered(net, axis):
    x = net.input("x", 5)
    index = net("Cast", net.input("i", 2), to="int64")
    return net("ScatterElements", x, index, net.input("u", 2), axis=axis)


def assigned(net, *columns):
    turned = [net("Transpose", net.input(name, size), perm=(1, 0)) for name, size in (("x", 5), ("u", len(columns)))]
    return net("ScatterND", turned[0], net.constant(np.array(columns)[:, None]), turned[1])


def picked(net, shared):
    data = net.input("x", 5, 3) if shared else net.draw(7, 3)
    return net("GatherND", data, net("Cast", net.input("i", 2, 1), to="int64"), batch_dims=shared)


@pytest.mark.parametrize("made, reason", [
    (lambda net: scattered(net, 1), ""), (lambda net: scattered(net, 0), "writes elements of other items"),
    (lambda net: assigned(net, 1, 3), ""), (lambda net: picked(net, 0), ""), (lambda net: picked(net, 1), ""),
    (lambda net: net("ScatterND", net.input("x", 5), net.constant(np.array([[0]])), net.draw(1, 5)), "other items"),
    (lambda net: net("GatherND", net.input("x", 5), net.constant(np.array([[0, 1]]))), "other items"),
    (lambda net: net("GatherND", net("Transpose", net.input("x", 5), perm=(1, 0)), net.constant(np.array([[2]]))), ""),
    (lambda net: net("Trilu", net.input("x", 4, 4)), ""), (lambda net: net("Trilu", net.input("x", 4)), "cuts along")])
def test_indices_keep_items_apart_where_they_are_of_other_axes(made, reason):
    net = Build()
    found = dependence_of(net, made(net))
    assert reason in found and bool(reason) == bool(found)
