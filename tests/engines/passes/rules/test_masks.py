"""Attention masks are simplified to few small nodes."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.engines.ir.graph import BATCH, Node, TensorType
from infer_server.engines.passes.pipeline import simplify
from tests.engines.passes.build import Build, keeps, ops


def places(net: Build, length: int, offsets: list[int]) -> str:
    """Add n * length + offsets for each item n: [N, len(offsets)]."""
    limit = net("Gather", net("Shape", net.input("like", 1)), net.constant(np.array(0)), axis=0)
    counts = Node("Range", (net.constant(np.array(0)), limit, net.constant(np.array(1))), ("counts",), {}, "counts")
    net.nodes.append(counts)            # its length follows from values, which only the import knows
    net.types["counts"] = TensorType(np.dtype(np.int64), (BATCH,))
    starts = net("Mul", net("Reshape", "counts", shape=(BATCH, 1)), net.constant(np.array([length])))
    return str(net("Add", net.constant(np.array(offsets)), starts))


@pytest.mark.parametrize(("offsets", "left"), [(list(range(5)), []), ([4, 0, 0], ["Gather"])])
def test_a_lookup_among_all_items_that_stays_inside_each_is_one_of_the_item(
        offsets: list[int], left: list[str]) -> None:
    net = Build()
    flat = net("Reshape", net.input("x", 5), shape=(f"5*{BATCH}",))
    graph = keeps(simplify, net.graph(net("Relu", net("Gather", flat, places(net, 5, offsets), axis=0))))
    assert ops(graph) == [*left, "Relu"]


def test_a_lookup_of_another_item_stays() -> None:
    net = Build()
    flat = net("Reshape", net.input("x", 5), shape=(f"5*{BATCH}",))
    graph = simplify(net.graph(net("Gather", flat, places(net, 3, [0, 1]), axis=0)))
    assert "Range" in ops(graph)


@pytest.mark.parametrize(("offsets", "left"), [(list(range(5)), []), ([4, 0, 0], ["Gather"])])
def test_a_lookup_of_pairs_that_stays_inside_each_item_is_one_of_the_item(offsets: list[int], left: list[str]) -> None:
    net = Build()
    graph = keeps(simplify, net.graph(net("Relu", net("GatherND", net.input("x", 5), pairs(net, offsets),
                                                      onnx_opset=17))))
    assert ops(graph) == [*left, "Reshape", "Relu"]


def test_a_lookup_of_pairs_of_which_one_lies_outside_stays() -> None:
    net = Build()
    graph = simplify(net.graph(net("GatherND", net.input("x", 5), pairs(net, [0, 5]), onnx_opset=17)))
    assert "GatherND" in ops(graph)


def pairs(net: Build, offsets: list[int]) -> str:
    """Add (n, offset) for each item n: [N, 1, len(offsets), 2]."""
    items = net("Reshape", places(net, 1, [0]), shape=(BATCH, 1, 1))
    shape = (BATCH, 1, len(offsets))
    both = [net("Expand", items, shape=shape), net("Expand", net.constant(np.array([[offsets]])), shape=shape)]
    return str(net("Concat", *(net("Reshape", i, shape=(*shape, 1)) for i in both), axis=3))


@pytest.mark.parametrize(("numbers", "stays"), [([3, 3, 3], False), ([3, 3, 4], True)])
def test_a_lookup_where_all_is_one_number_needs_no_places(numbers: list[int], stays: bool) -> None:
    net = Build()
    table = net("Expand", net.constant(np.array([numbers])), shape=(BATCH, 3))
    index = net("Cast", net("Greater", net.input("x", 3), net.constant(np.float32(0))), to="int64")
    graph = keeps(simplify, net.graph(net("Cast", net("GatherElements", table, index, axis=1), to="float32")))
    assert ("GatherElements" in ops(graph)) == stays


def test_what_is_expanded_to_meet_a_larger_tensor_meets_it_as_it_is() -> None:
    net = Build()
    x, small = net.input("x", 4, 7), net.input("small", 1, 7)
    wide = net("Expand", small, shape=(BATCH, 4, 7))
    graph = keeps(simplify, net.graph(net("Add", x, net("Mul", wide, net.constant(np.float32(0.5))))))
    assert ops(graph) == ["Mul", "Add"] and graph.shape(graph.nodes[0].outputs[0]) == (BATCH, 1, 7)


def test_what_is_expanded_because_nothing_else_is_as_large_stays() -> None:
    net = Build()
    wide = net("Expand", net.input("small", 1, 7), shape=(BATCH, 4, 7))
    assert sorted(ops(keeps(simplify, net.graph(net("Relu", wide))))) == ["Expand", "Relu"]


def test_and_with_nothing_but_true_is_nothing() -> None:
    net = Build()
    mask = net("Greater", net.input("x", 1, 7), net.constant(np.float32(0)))
    both = net("And", mask, net.constant(np.ones((4, 7), bool)))
    y = net("Where", both, net.input("y", 4, 7), net.constant(np.float32(-1e9)))
    assert ops(keeps(simplify, net.graph(y))) == ["Greater", "Where"]


def test_a_softmax_that_is_guarded_against_rows_without_anything_to_see_needs_no_guard() -> None:
    net = Build()
    scores = net("Softmax", net.input("x", 4, 7), axis=-1)
    y = net("Where", net("IsNaN", scores), net.constant(np.float32(0)), scores)
    assert ops(keeps(simplify, net.graph(y))) == ["Softmax"]
