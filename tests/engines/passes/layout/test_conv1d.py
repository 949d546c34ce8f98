"""1-D convolutions become those of one-row images, without nodes between a layer and its epilogue."""
import numpy as np
import pytest

from infer_server.engines.passes.layout.conv1d import conv1d_to_conv2d
from infer_server.engines.passes.pipeline import optimise, simplify
from tests.engines.passes.build import Build, keeps, ops

WINDOW = {"strides": (2,), "dilations": (1,), "pads": (1, 0)}


def conv(net, x, out, kernel=3, group=1, **attrs):
    weight = net.draw(out, net.channels(x) // group, kernel)
    defaults = {"strides": (1,), "dilations": (1,), "pads": (kernel // 2, (kernel - 1) // 2)}
    return net("Conv", x, weight, net.draw(out), kernel_shape=(kernel,), group=group, **{**defaults, **attrs})


@pytest.mark.parametrize("op, attrs, constants", [
    ("Conv", {"kernel_shape": (3,), "group": 2, **WINDOW}, [(8, 3, 3), (8,)]),
    ("Conv", {"kernel_shape": (3,), "group": 1, "strides": (1,), "dilations": (2,), "pads": (2, 2)}, [(5, 6, 3)]),
    ("ConvTranspose", {"kernel_shape": (3,), "group": 1, **WINDOW, "output_padding": (1,)}, [(6, 4, 3), (4,)]),
    ("MaxPool", {"kernel_shape": (3,), **WINDOW}, []),
    ("AveragePool", {"kernel_shape": (3,), **WINDOW, "count_include_pad": 1}, []),
], ids=["grouped", "dilated", "transposed", "max pool", "average pool"])
def test_a_window_over_lines_is_one_over_images(op, attrs, constants):
    net = Build()
    y = net(op, net.input("x", 6, 16), *(net.draw(*shape) for shape in constants), **attrs)
    after = keeps(conv1d_to_conv2d, net.graph(y))
    assert ops(after) == ["Reshape", op, "Reshape"]


def test_what_stands_between_windows_stays_with_them():
    net = Build()
    x = net.input("x", 6, 16)
    a = net("Relu", conv(net, x, 8))
    b = net("Mul", net("PRelu", conv(net, a, 8), net.constant(np.full((8, 1), 0.2))), net.constant(0.5))
    y = conv(net, net("Concat", net("Add", a, b), a, axis=1), 4)
    after = keeps(conv1d_to_conv2d, net.graph(y))
    assert ops(after) == ["Reshape", "Conv", "Relu", "Conv", "PRelu", "Mul", "Add", "Concat", "Conv", "Reshape"]


def test_another_reader_sees_the_line():
    net = Build()
    a = conv(net, net.input("x", 6, 16), 8)
    after = keeps(conv1d_to_conv2d, net.graph(net("Softmax", a, axis=2), net("Relu", a), a))
    assert ops(after) == ["Reshape", "Conv", "Reshape", "Softmax", "Relu", "Reshape"]


def test_layers_of_signals_are_fused_as_those_of_images():
    net = Build()
    x = net("Relu", net.batch_norm(conv(net, net.input("x", 6, 16), 8)))
    y = net("Relu", net("Add", conv(net, x, 8), x))
    after = keeps(lambda graph: optimise(simplify(graph)), net.graph(y))
    assert ops(after) == ["Reshape", "Transpose", "Conv+Relu", "Conv+Add+Relu", "Reshape", "Transpose"]


def test_a_graph_without_lines_is_left_alone():
    net = Build()
    graph = net.graph(net.conv(net.input("x", 3, 8, 8), 4, 3))
    assert conv1d_to_conv2d(graph) is graph
