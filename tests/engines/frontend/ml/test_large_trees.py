"""Tests of the memory per node while ensembles of millions of nodes are imported."""
from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.onnx_file import read_model
from infer_server.engines.frontend.onnx_import import node_of
from infer_server.engines.frontend.operators.ml.trees import _NodeIndex


def classifier(trees: int) -> onnx.NodeProto:
    """Return an ensemble of trees with one split each."""
    count = range(trees)
    lists: dict[str, Any] = {
        "nodes_treeids": [tree for tree in count for _ in range(3)], "nodes_nodeids": [0, 1, 2] * trees,
        "nodes_featureids": [0] * 3 * trees, "nodes_values": [0.5, 0.0, 0.0] * trees,
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * trees, "nodes_truenodeids": [1, 0, 0] * trees,
        "nodes_falsenodeids": [2, 0, 0] * trees, "class_treeids": [tree for tree in count for _ in range(2)],
        "class_nodeids": [1, 2] * trees, "class_ids": [0, 1] * trees, "class_weights": [0.25, 0.75] * trees}
    return helper.make_node("TreeEnsembleClassifier", ["x"], ["label", "p"], domain="ai.onnx.ml",
                            classlabels_int64s=[0, 1], **lists)


def test_lists_by_node_are_arrays_and_equal_words_one_object() -> None:
    attrs = node_of("m", classifier(50)).attrs
    assert attrs["nodes_treeids"].dtype == attrs["class_ids"].dtype == np.int64
    assert attrs["nodes_values"].dtype == attrs["class_weights"].dtype == np.float32
    assert len({id(mode) for mode in attrs["nodes_modes"]}) == 2
    assert attrs["classlabels_int64s"] == (0, 1)


def test_nodes_are_found_by_tree_and_number_whatever_these_are() -> None:
    trees, numbers = np.array([-7, 1 << 60, -7, 1 << 60, 3]), np.array([5, 5, -(1 << 60), 9, 5])
    places = _NodeIndex(trees, numbers)
    assert places.find(trees, numbers).tolist() == [0, 1, 2, 3, 4]
    twice = _NodeIndex(np.array([0, 0, 0]), np.array([1, 2, 1]))
    assert twice.find(np.array([0, 0]), np.array([1, 2])).tolist() == [2, 1], "the last of equal ones"


@pytest.mark.parametrize(("tree", "number"), [(0, 7), (9, 1), (1, 2), (-1, 1)])
def test_a_node_that_is_missing_is_named(tree: int, number: int) -> None:
    places = _NodeIndex(np.array([0, 0, 1]), np.array([1, 2, 1]))
    with pytest.raises(GraphError, match=f"tree {tree} has no node {number}$"):
        places.find(np.array([0, tree]), np.array([1, number]))


def test_the_model_is_read_without_a_second_copy_by_way_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """make_graph and make_model copied each node twice: 2.8 GB for a model of 194 MB."""
    graph = helper.make_graph([classifier(3)], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1])],
                              [helper.make_tensor_value_info("p", TensorProto.FLOAT, ["N", 2])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)],
                              ir_version=8)
    monkeypatch.setattr(helper, "make_graph", None)
    read = read_model(model).proto
    assert read.graph.node == model.graph.node and read.graph.input == model.graph.input
    assert read.opset_import == model.opset_import and read.ir_version == 8
