"""Models of older opsets: converted, and said so, or refused."""
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engines.compiler.builder import BuildConfig, Builder
from engines.errors import ModelError
from engines.frontend.onnx_import import graph_from_onnx
from engines.ops.reference import run


def model(opset, op="Relu", slope=None, **attrs):
    inputs = ["x", "slope"] if slope is not None else ["x"]
    constants = [] if slope is None else [onnx.numpy_helper.from_array(np.asarray(slope, np.float32), "slope")]
    graph = helper.make_graph([helper.make_node(op, inputs, ["y"], name="n", **attrs)], "m",
                              [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


@pytest.mark.parametrize("opset", [6, 7, 8])
def test_an_older_opset_is_converted_and_the_user_is_told(opset):
    notices = []
    graph = graph_from_onnx(model(opset), notices=notices)
    assert notices == [f"m: opset {opset} was converted to 9 by onnx"]
    np.testing.assert_array_equal(run(graph, {"x": np.full((2, 3), -1, np.float32)})["y"], np.zeros((2, 3)))


def test_a_build_has_the_notice_that_its_model_was_converted():
    builder = Builder(BuildConfig(timing=False))
    builder.graph(model(8))
    assert builder.notices == ["m: opset 8 was converted to 9 by onnx"]


def test_an_opset_that_needs_no_conversion_needs_no_notice():
    notices = []
    graph_from_onnx(model(9), notices=notices)
    assert notices == []


@pytest.mark.parametrize(("opset", "message"), [
    (5, "opset 5 is older than 6"), (onnx.defs.onnx_opset_version() + 1, "is newer than what the onnx package")])
def test_an_opset_that_cannot_be_read_is_refused(opset, message):
    with pytest.raises(ModelError, match=message):
        graph_from_onnx(model(opset))


def test_slopes_of_channels_are_not_taken_for_slopes_of_the_last_axis():
    with pytest.raises(ModelError, match="'n' .PRelu.: slopes of channels in opset 6"):
        graph_from_onnx(model(6, "PRelu", slope=[1, 2, 3]))
    graph_from_onnx(model(6, "PRelu", slope=[0.5]))
    graph_from_onnx(model(7, "PRelu", slope=[1, 2, 3]))


def test_what_the_converter_does_not_take_is_refused_with_its_reason():
    with pytest.raises(ModelError, match="opset 8 could not be converted to 9 by onnx"):
        graph_from_onnx(model(8, "Upsample", mode="nearest"))
