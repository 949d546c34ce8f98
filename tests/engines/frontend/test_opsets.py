"""Models of older opsets are imported; opsets newer than the onnx package are refused."""
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ops.reference import run

X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
CHANNELS = np.array([1, 2, 3], np.float32)
ALIGNED = CHANNELS.reshape(3, 1)
PIXELS = X[0] ** 2


def model(opset, op="Relu", *constants, outputs=1, **attrs):
    arrays = [onnx.numpy_helper.from_array(np.asarray(value), f"c{i}") for i, value in enumerate(constants)]
    made = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph([helper.make_node(op, ["x", *(a.name for a in arrays)], made, name="n", **attrs)], "m",
                              [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
                              [helper.make_tensor_value_info("y0", TensorProto.FLOAT, None)], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def batch_norm(x):
    return (x - ALIGNED) / np.sqrt(ALIGNED + 1e-5) * ALIGNED + ALIGNED


@pytest.mark.parametrize(("proto", "wanted"), [
    (model(1, consumed_inputs=[0]), np.maximum(X, 0)),
    (model(6, "Add", CHANNELS, broadcast=1, axis=1), X + ALIGNED),
    (model(6, "Sub", CHANNELS, broadcast=1, axis=-2), X - ALIGNED),
    (model(6, "Mul", X[0, 0], broadcast=1), X * X[0, 0]),
    (model(6, "PRelu", CHANNELS), np.where(X < 0, X * ALIGNED, X)),
    (model(6, "PRelu", CHANNELS[:1]), X),
    (model(6, "BatchNormalization", *[CHANNELS] * 4, is_test=1), batch_norm(X)),
    (model(8, "BatchNormalization", *[CHANNELS] * 4, spatial=1), batch_norm(X)),
    (model(8, "BatchNormalization", *[PIXELS] * 4, spatial=0), (X - PIXELS) / np.sqrt(PIXELS + 1e-5) * PIXELS + PIXELS),
    (model(7, "TopK", k=4, outputs=2), -np.sort(-X)),
    (model(6, "Dropout", is_test=1, ratio=0.5), X),
    (model(5, "Cast", to="float"), X),
    (model(4, "Reshape", shape=[0, -1]), X.reshape(2, 12)),
    (model(3, "Concat"), X),
    (model(1, "Pad", paddings=[0, 0, 1, 0, 0, 0], value=2.0), np.pad(X, [(0, 0), (0, 0), (1, 0)], constant_values=2)),
    (model(5, "Tile", np.array([2], np.float32), np.array([1], np.float32)), np.tile(X, (1, 2, 1))),
])
def test_forms_of_older_opsets_mean_what_they_meant(proto, wanted):
    made = run(graph_from_onnx(proto), {"x": X})["y0"]
    np.testing.assert_allclose(made, wanted, 1e-6)


@pytest.mark.parametrize(("proto", "message"), [
    (model(onnx.defs.onnx_opset_version() + 1), "is newer than what the onnx package"),
    (model(0), "opset 0 does not exist"),
    (model(6, "BatchNormalization", *[CHANNELS] * 4, outputs=5), "in training mode"),
    (model(6, "Add", CHANNELS, broadcast=1, axis=2), "broadcast|3 and 4|axes")])
def test_what_they_meant_and_cannot_be_done_is_refused(proto, message):
    with pytest.raises(ModelError, match=message):
        graph_from_onnx(proto)


def test_weights_of_an_old_file_need_not_be_inputs():
    """ONNX requires it up to IR version 3, ONNX Runtime does not."""
    old = model(7, "PRelu", np.float32([0.5]))
    old.ir_version = 3
    np.testing.assert_array_equal(run(graph_from_onnx(old), {"x": X})["y0"], np.where(X < 0, X * 0.5, X))
