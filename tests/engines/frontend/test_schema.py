"""Nodes must match the schema of their opset: attributes, number of inputs and outputs, types."""
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.onnx_import import graph_from_onnx

SHAPE = [1, 4, 6, 6]


def imported(op, inputs="x", outputs="y", opset=20, dtypes=None, **attrs):
    """Import a model of one node; x is float32, w3 [4, 4, 3] and w1 [4] are constants."""
    node = helper.make_node(op, inputs.split(" "), [name for name in outputs.split(" ") if name], name="n", **attrs)
    given = {"x": TensorProto.FLOAT} | (dtypes or {})
    graph = helper.make_graph(
        [node], "m", [helper.make_tensor_value_info(name, dtype, SHAPE) for name, dtype in given.items()],
        [helper.make_empty_tensor_value_info(name) for name in node.output or ("y",)],
        [onnx.numpy_helper.from_array(np.ones(shape, np.float32), name)
         for name, shape in (("w3", (4, 4, 3)), ("w1", (4,)))])
    return graph_from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))


@pytest.mark.parametrize(("message", "op", "arguments"), [
    ("has no attribute 'alpa'; did you mean 'alpha'", "LeakyRelu", {"alpa": 0.1}),
    ("attribute 'alpha' has type INT, but LeakyRelu takes FLOAT", "LeakyRelu", {"alpha": 1}),
    ("attribute 'keepdims' is 2, but must be 0 or 1", "ReduceMean", {"keepdims": 2}),
    ("attribute 'group' is 0, but must be at least 1", "Conv", {"inputs": "x w3", "group": 0}),
    ("attribute 'mode' is 'RCD', but must be one of DCR, CRD", "DepthToSpace", {"blocksize": 2, "mode": "RCD"}),
    ("attribute 'kernel_shape' of MaxPool is missing", "MaxPool", {}),
    ("input 1 .'W'. is missing", "Conv", {"inputs": "x  w1"}),
    ("the node has 1 inputs, but MatMul of opset 13 takes 2", "MatMul", {}),
    ("the node has 2 inputs, but Relu of opset 14 takes 1", "Relu", {"inputs": "x x"}),
    ("the node has 2 outputs, but Relu of opset 14 has 1", "Relu", {"outputs": "y z"}),
    ("the node has 0 outputs, but Relu of opset 14 has 1", "Relu", {"outputs": ""}),
    ("is int64, which Sigmoid of opset 13 does not take", "Sigmoid",
     {"inputs": "i", "dtypes": {"i": TensorProto.INT64}}),
    ("is int64, but Add needs the type of another input, tensor.float.", "Add",
     {"inputs": "x i", "dtypes": {"i": TensorProto.INT64}}),
    ("a Constant must have exactly one value attribute, but has 0", "Constant", {"inputs": ""}),
    ("opset 17 of ONNX has no Gelu", "Gelu", {"opset": 17}),
    ("opset 20 of ONNX has no ScaledDotProductAttention", "ScaledDotProductAttention", {"inputs": "x x x"}),
    ("the window has 1 axes, so the input needs 3", "Conv", {"inputs": "x w3"}),
    ("the window has 0 axes", "Conv", {"inputs": "x w1"}),
    ("strides are .0, 1., but must be 2 values of at least 1", "MaxPool", {"kernel_shape": [2, 2], "strides": [0, 1]}),
    ("999 is not an element type", "Cast", {"to": 999}),
])
def test_a_node_that_onnx_does_not_know_is_refused(message, op, arguments):
    with pytest.raises(ModelError, match=message) as error:
        imported(op, **arguments)
    assert "'n'" in str(error.value) or "'y'" in str(error.value)


def test_an_attribute_that_our_operator_has_not_goes_to_the_onnx_package():
    (node,) = imported("LayerNormalization", "x w1", axis=1, stash_type=TensorProto.DOUBLE).nodes
    assert node.op == "onnx.LayerNormalization" and node.attrs["stash_type"] == TensorProto.DOUBLE


def test_an_attribute_that_says_what_its_absence_would_changes_nothing():
    plain, said = (imported("Cast", to=TensorProto.FLOAT16, **attrs).nodes for attrs in ({}, {"saturate": 1}))
    assert plain == said


def test_all_nodes_that_are_refused_are_told_at_once_with_the_operators_that_nobody_knows():
    nodes = [helper.make_node("Relu", ["x", "x"], ["a"], name="first"),
             helper.make_node("Frobnicate", ["a"], ["b"], name="unknown"),
             helper.make_node("LeakyRelu", ["b"], ["y"], name="second", alpa=0.1)]
    graph = helper.make_graph(nodes, "m", [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
                              [helper.make_empty_tensor_value_info("y")])
    with pytest.raises(ModelError, match="3 faults") as error:
        graph_from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
    assert all(said in str(error.value) for said in ("'first'", "Frobnicate", "'second'"))
