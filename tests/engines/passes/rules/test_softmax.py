"""Operators along one axis are moved to the innermost axis."""
import pytest

from infer_server.engines.passes.pipeline import optimise, simplify
from tests.engines.passes.build import Build, keeps, ops


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "LpNormalization"])
def test_a_middle_axis_is_moved_to_the_end_and_back(op):
    net = Build()
    after = keeps(lambda graph: optimise(simplify(graph)), net.graph(net(op, net.input("x", 5, 7), axis=1)))
    assert ops(after) == ["Transpose", op, "Transpose"]


def test_an_axis_before_axes_of_one_element_is_only_seen_otherwise():
    net = Build()
    after = keeps(lambda graph: optimise(simplify(graph)), net.graph(net("Softmax", net.input("x", 5, 1), axis=1)))
    assert ops(after) == ["Reshape", "Softmax", "Reshape"]


def test_the_innermost_axis_stays_where_it_is():
    net = Build()
    after = keeps(lambda graph: optimise(simplify(graph)), net.graph(net("Softmax", net.input("x", 5, 7), axis=2)))
    assert ops(after) == ["Softmax"]
