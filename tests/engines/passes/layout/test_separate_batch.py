"""Axes that exporters merge with the batch are separated, with unchanged results."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infer_server.engines.ir.graph import BATCH, Graph
from infer_server.engines.passes.layout.separate_batch import separate_batch
from infer_server.engines.passes.pipeline import simplify
from infer_server.engines.passes.rewriting.notes import Note
from tests.engines.passes.build import Build, keeps, ops


def windows(net: Build) -> str:
    """Split [N, 4, 6, 5] into two windows per item, [2 N, 4, 3, 5]."""
    x = net.input("x", 4, 6, 5)
    x = net("Transpose", net("Reshape", x, shape=(BATCH, 4, 2, 3, 5)), perm=(0, 2, 1, 3, 4))
    return str(net("Reshape", x, shape=(f"2*{BATCH}", 4, 3, 5)))


def together(net: Build, x: str) -> str:
    width = net.types[x].shape[-1]
    x = net("Reshape", x, shape=(BATCH, 2, 4, 3, width))
    return str(net("Reshape", net("Transpose", x, perm=(0, 2, 1, 3, 4)), shape=(BATCH, 4, 6, width)))


INSIDE: dict[str, Callable[[Build, str], str]] = {
    "a softmax": lambda net, x: net("Softmax", x, axis=-1),
    "a norm": lambda net, x: net("LayerNormalization", x, net.draw(5), net.draw(5), axis=3, epsilon=1e-5),
    "a constant for all windows": lambda net, x: net("Add", x, net.draw(1, 4, 1, 5)),
    "a number for each element behind": lambda net, x: net("Mul", x, net.draw(3, 5)),
    "a product by constants": lambda net, x: net("MatMul", x, net.draw(5, 5)),
    "a product of two": lambda net, x: net("MatMul", net("MatMul", x, net("Transpose", x, perm=(0, 1, 3, 2))), x),
    "a transpose and back": lambda net, x: net("Transpose", net("Transpose", x, perm=(0, 2, 3, 1)), perm=(0, 3, 1, 2)),
    "a mean that broadcasts": lambda net, x: net("Sub", x, net("ReduceMean", x, axes=(2,), keepdims=1)),
    "a cut and a joint": lambda net, x: net("Concat", *net("Split", x, axis=1, split=(1, 3), count=2)[::-1], axis=1),
    "a slice": lambda net, x: net("Concat", net("Slice", x, axes=(2,), starts=(1,), ends=(3,), steps=(1,)),
                                  net("Slice", x, axes=(2,), starts=(0,), ends=(1,), steps=(1,)), axis=2),
    "elements in order": lambda net, x: net("TopK", x, axis=3, k=5, count=2)[0],
    "a lookup": lambda net, x: net("Gather", x, net.constant(np.array([2, 0, 1])), axis=2),
    "elements picked by places alike for all windows": lambda net, x: net(
        "GatherElements", x, net.constant(np.array([[[[2], [0], [1]]]])), axis=3, shape=(f"2*{BATCH}", 4, 3, 1)),
    "elements picked by places of each window": lambda net, x: net("GatherElements", x, net(
        "Cast", net("Greater", x, net.constant(np.float32(0))), to="int64"), axis=2),
}


@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_what_is_computed_inside_windows_is_computed_beside_the_batch(inside: Callable[[Build, str], str]) -> None:
    net = Build()
    graph = keeps(separate_batch, net.graph(together(net, inside(net, windows(net)))))
    assert not merged(graph)


def merged(graph: Graph) -> list[str]:
    return [name for name, kind in graph.types.items() if any(str(d) not in (BATCH, str(d).lstrip("-")) or "*" in str(d)
                                                              for d in kind.shape)]


def test_rows_of_a_linear_layer_are_counted_apart() -> None:
    net = Build()
    rows = net("Reshape", net.input("x", 7, 6), shape=(f"7*{BATCH}", 6))
    y = net("Reshape", net("Relu", net.linear(rows, 9)), shape=(BATCH, 7, 9))
    graph = keeps(simplify, net.graph(y))
    assert ops(graph) == ["MatMul", "Add", "Relu"]


def test_steps_before_the_batch_are_counted_before_it() -> None:
    """PyTorch's attention reshapes [S, N, E] to [S, N * heads, E / heads]."""
    net = Build()
    steps = net("Transpose", net.input("x", 7, 6), perm=(1, 0, 2))
    heads = net("Transpose", net("Reshape", steps, shape=(7, f"2*{BATCH}", 3)), perm=(1, 0, 2))
    scores = net("Softmax", net("MatMul", heads, net("Transpose", heads, perm=(0, 2, 1))), axis=-1)
    back = net("Reshape", net("Transpose", net("MatMul", scores, heads), perm=(1, 0, 2)), shape=(7, BATCH, 6))
    graph = keeps(separate_batch, net.graph(net("Transpose", back, perm=(1, 0, 2))))
    assert not merged(graph)


@pytest.mark.parametrize("node", [("Softmax", {"axis": 0}), ("ReduceSum", {"axes": (0,), "keepdims": 0})])
def test_a_node_along_the_merged_axis_leaves_the_graph_as_it_is_and_says_why(node: tuple[str, dict[str, Any]]) -> None:
    net, log = Build(), list[Note]()
    graph = net.graph(net(node[0], windows(net), **node[1]))
    assert separate_batch(graph, log) is graph
    assert "along the axis that counts the batch" in str(log[0])


def test_items_twice_over_count_more_than_the_batch_and_say_so() -> None:
    net, log = Build(), list[Note]()
    x = net.input("x", 7)
    graph = net.graph(net("Concat", x, net("Relu", x), axis=0))
    assert separate_batch(graph, log) is graph
    assert "Concat makes an axis that counts more than the batch" in str(log[0])
