"""Graphs are unchanged by conversion to JSON and back."""
import json

import numpy as np
import pytest

from infer_server.engines.errors import PlanCorruptError
from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.serialize import graph_from_json, graph_to_json, node_from_json, node_to_json
from tests.engines.frontend.test_onnx_export import channels_last_graph


def test_a_quantised_graph_with_bodies_and_arrays_in_attributes_comes_back_equal():
    graph = channels_last_graph(True)
    document, arrays = graph_to_json(graph)
    back = graph_from_json(json.loads(json.dumps(document)), arrays)
    assert str(back) == str(graph)
    assert back.types == graph.types


def test_the_dtype_and_shape_of_an_array_attribute_survive():
    node = Node("ConstantOfShape", (), ("y",), {"shape": ("batch", 3), "value": np.array([7], np.int32)})
    value = node_from_json(json.loads(json.dumps(node_to_json(node)))).attrs["value"]
    assert value.dtype == np.int32 and value.tolist() == [7]


def test_a_damaged_document_is_a_corrupt_plan():
    with pytest.raises(PlanCorruptError):
        node_from_json({"op": "Relu"})
