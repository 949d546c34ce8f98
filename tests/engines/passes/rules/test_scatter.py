"""Assignments to consecutive rows of a tensor become Concats."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.engines.ir.graph import BATCH, Node, TensorType
from infer_server.engines.passes.pipeline import simplify
from tests.engines.passes.build import Build, keeps, ops


def assigned(rows: list[int], **attrs: str) -> Build:
    """Write x[:, rows] = new as an exporter does, with the sliced axis first."""
    net = Build()
    x, new = (net("Transpose", net.input(name, count), perm=(1, 0)) for name, count in (("x", 5), ("new", len(rows))))
    places = net.constant(np.array(rows)[:, None])
    net.types["y"] = TensorType(np.dtype(np.float32), (5, BATCH))
    net.nodes.append(Node("ScatterND", (x, places, new), ("y",), {"onnx_opset": 17, **attrs}, "y"))
    return net


@pytest.mark.parametrize(("rows", "parts"), [([0, 1], 2), ([2, 3], 3), ([3, 4], 2), ([-1], 2), ([0, 1, 2, 3, 4], 1)])
def test_rows_that_follow_each_other_are_a_part(rows: list[int], parts: int) -> None:
    net = assigned(rows)
    graph = keeps(simplify, net.graph(net("Transpose", "y", perm=(1, 0))))
    assert "ScatterND" not in ops(graph) and sum(op == "Slice" for op in ops(graph)) == parts - 1


@pytest.mark.parametrize("net", [assigned([0, 2]), assigned([1, 0]), assigned([1, 2], reduction="add")],
                         ids=["a gap", "backwards", "sums"])
def test_other_assignments_stay(net: Build) -> None:
    assert "ScatterND" in ops(keeps(simplify, net.graph(net("Transpose", "y", perm=(1, 0)))))


def columns_of_all(columns: list[int], *rest: int, step: int = 1, **attrs: str) -> Build:
    """Write x[:, columns] = new as PyTorch does for a dynamic batch, with item offsets n * step."""
    net = Build()
    x, new = net.input("x", 5, *rest), net.input("new", len(columns), *rest)
    net.types["n"] = TensorType(np.dtype(np.int64), (BATCH,))
    limit = net("Gather", net("Shape", x), net.constant(np.array(0)), axis=0)
    net.nodes.append(Node("Range", (net.constant(np.array(0)), limit, net.constant(np.array(step))), ("n",), {}, "n"))
    count, each = len(columns), net("Reshape", "n", shape=(BATCH, 1, 1))
    each = each if step else net.constant(np.zeros((1, 1), np.int64))
    pairs = net("Concat", net("Expand", each, shape=(BATCH, count, 1)),
                net("Expand", net.constant(np.array(columns)[:, None]), shape=(BATCH, count, 1)), axis=-1)
    net.types["y"] = net.types[x]
    net.nodes.append(Node("ScatterND", (x, pairs, new), ("y",), {"onnx_opset": 17, **attrs}, "y"))
    return net


@pytest.mark.parametrize("rest", [(), (3,)], ids=["numbers", "rows"])
@pytest.mark.parametrize(("columns", "parts"), [([0], 2), ([2, 3], 3), ([-1], 2), ([0, 1, 2, 3, 4], 1)])
def test_columns_of_all_items_are_a_part(columns: list[int], parts: int, rest: tuple[int, ...]) -> None:
    graph = keeps(simplify, columns_of_all(columns, *rest).graph("y"))
    assert "ScatterND" not in ops(graph) and sum(op == "Slice" for op in ops(graph)) == parts - 1


@pytest.mark.parametrize("net", [columns_of_all([0, 2]), columns_of_all([1, 2], reduction="add"),
                                 columns_of_all([1, 2], step=2), columns_of_all([1, 2], step=0)],
                         ids=["a gap", "sums", "every other item", "the first item"])
def test_other_assignments_to_columns_stay(net: Build) -> None:
    assert "ScatterND" in ops(simplify(net.graph("y")))


@pytest.mark.parametrize(("places", "joined"), [([[[0, 1], [0, 2]], [[1, 1], [1, 2]]], True),
                                                ([[[1, 1], [1, 2]], [[0, 1], [0, 2]]], False),
                                                ([[[0, 1], [0, 2]], [[1, 2], [1, 3]]], False)],
                         ids=["each item's own", "another item's", "other columns"])
def test_a_batch_of_known_size_is_assigned_to_by_constants(places: list[list[list[int]]], joined: bool) -> None:
    net = Build()
    x, new = net.input("x", 5), net.input("new", 2)
    net.types |= {name: TensorType(np.dtype(np.float32), (2, width)) for name, width in ((x, 5), (new, 2), ("y", 5))}
    net.nodes.append(Node("ScatterND", (x, net.constant(np.array(places)), new), ("y",), {"onnx_opset": 17}, "y"))
    assert ("ScatterND" not in ops(keeps(simplify, net.graph("y")))) == joined
