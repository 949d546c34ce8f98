"""Assignments to a part of a tensor become joints, where they are assignments to rows that follow each other."""
from __future__ import annotations

import numpy as np
import pytest

from engines.ir.graph import BATCH, Node, TensorType
from engines.passes.pipeline import simplify
from tests.engines.passes.build import Build, keeps, ops


def assigned(rows: list[int], **attrs: str) -> Build:
    """x[:, rows] = new, as an exporter writes it: the axis that is cut first."""
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
