"""What is exported runs in ONNX Runtime and gives what the reference gives."""
import numpy as np
import onnx.parser
import onnxruntime
import pytest

from engines.frontend.onnx_export import onnx_from_graph
from engines.frontend.onnx_import import graph_from_onnx
from engines.ir import Graph, Node, QParams, TensorType, type_of, verify
from engines.passes.pipeline import optimise, simplify
from engines.reference import run
from tests.zoo import run_onnx

RANDOM = np.random.default_rng(0)
F32 = np.dtype(np.float32)
U8 = QParams((0.05,), (128,), "uint8")


def runtime(graph, feeds):
    model = onnx_from_graph(graph).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return dict(zip(graph.outputs, session.run(list(graph.outputs), feeds), strict=True))


def channels_last_graph(quantised):
    """x -> NHWC -> Fused(Conv, Add of channels, Clip per channel, Add of itself) -> pool -> concat -> NCHW y."""
    image, w = ("batch", 6, 6, 4), RANDOM.standard_normal((4, 4, 3, 3)).astype(np.float32)
    constants = {"w": w, "c": RANDOM.standard_normal(4).astype(np.float32)}
    weights = None
    if quantised:
        weights = QParams(tuple(float(s) for s in np.abs(w).max((1, 2, 3)) / 127), (0,) * 4, "int8", 0)
        constants["w"] = np.rint(w / np.reshape(weights.scale, (4, 1, 1, 1))).astype(np.int8)
    window = {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (1, 1), "dilations": (1, 1)}
    bounds = {"min": np.array([-1, -2, -3, -4], np.float32), "max": np.array([1, 2, 3, 4], np.float32)}
    body = (Node("Conv", ("xl", "w"), ("t0",), {**window, "group": 1, "channels_last": 1}, "conv"),
            Node("Add", ("t0", "c"), ("t1",)), Node("Clip", ("t1",), ("t2",), bounds),
            Node("Add", ("t2", "xl"), ("f",)))
    nodes = (Node("Transpose", ("x",), ("xl",), {"perm": (0, 2, 3, 1)}),
             Node("Fused", ("xl", "w", "c"), ("f",), name="conv", body=body),
             Node("MaxPool", ("f",), ("p",), {**window, "channels_last": 1}),
             Node("Concat", ("f", "p"), ("k",), {"axis": 3}),
             Node("Transpose", ("k",), ("y",), {"perm": (0, 3, 1, 2)}))
    quant = U8 if quantised else None
    types = {"x": TensorType(F32, ("batch", 4, 6, 6)), "y": TensorType(F32, ("batch", 8, 6, 6)),
             "c": type_of(constants["c"]), "w": TensorType(constants["w"].dtype, w.shape, weights),
             **{name: TensorType(F32, image) for name in ("t0", "t1", "t2")},
             **{name: TensorType(F32, image, quant) for name in ("xl", "f", "p")},
             "k": TensorType(F32, ("batch", 6, 6, 8), quant)}
    return verify(Graph("g", ("x",), ("y",), nodes, constants, types))


@pytest.mark.parametrize("quantised", [False, True])
def test_a_channels_last_graph_is_written_channels_first_and_computes_the_same(quantised):
    graph = channels_last_graph(quantised)
    x = RANDOM.standard_normal((2, 4, 6, 6)).astype(np.float32)
    expected = run(graph, {"x": x})["y"]
    step = U8.scale[0] if quantised else 0      # a value on the edge between two steps may round either way
    np.testing.assert_allclose(runtime(graph, {"x": x})["y"], expected, rtol=1e-5, atol=1e-5 + step)


def test_no_transpose_is_left_where_all_operators_follow():
    proto = onnx_from_graph(channels_last_graph(False))
    assert [n.op_type for n in proto.graph.node] == ["Conv", "Add", "Max", "Min", "Add", "MaxPool", "Concat"]


def test_quantised_weights_are_integers_with_a_scale_for_each_channel():
    proto = onnx_from_graph(channels_last_graph(True))
    stored = {i.name: i for i in proto.graph.initializer}
    weights = next(n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.output[0] == "w")
    assert stored[weights.input[0]].data_type == 3      # INT8
    assert stored[weights.input[1]].dims == [4]


def test_attention_whose_keys_came_transposed_is_exported_under_names_of_its_own() -> None:
    """The pass turns such keys under a name of the attention's; so does the export."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        m (float[N,2,4,8] q, float[N,2,8,4] k, float[N,2,4,8] v) => (float[N,2,4,8] z)
        { scores = MatMul(q, k)  weights = Softmax<axis = -1>(scores)  y = MatMul(weights, v)
          z = Softmax<axis = -1>(y) }""")
    graph = optimise(simplify(graph_from_onnx(model)))
    assert "ScaledDotProductAttention" in {node.op for node in graph.nodes}
    exported = onnx_from_graph(graph)
    names = [name for node in exported.graph.node for name in node.output]
    assert len(names) == len(set(names))
    rng = np.random.default_rng(0)
    feeds = {"q": rng.standard_normal((3, 2, 4, 8), np.float32), "k": rng.standard_normal((3, 2, 8, 4), np.float32),
             "v": rng.standard_normal((3, 2, 4, 8), np.float32)}
    np.testing.assert_allclose(run_onnx(exported, feeds)["z"], run_onnx(model, feeds)["z"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nodes, constants", [
    ("y = RMSNormalization<axis = -1>(x, scale)", {"scale": RANDOM.standard_normal(8).astype(np.float32)}),
    ("""axis = Constant<value = int64 {2}>()  y = CumSum<exclusive = 1>(x, axis)""", {}),
    ("""shape = Shape<end = 2>(x)  three = Constant<value = int64[1] {3}>()  all = Concat<axis = 0>(shape, three)
        every = Expand(index, all)  y = GatherElements<axis = 2>(x, every)""",
     {"index": RANDOM.integers(0, 8, (1, 5, 3))})], ids=["a norm by root mean square", "sums", "repeated places"])
def test_what_the_exported_opset_has_otherwise_is_written_by_what_it_has(nodes, constants):
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 23]> m (float[N,5,8] x) => (float[N,5,M] y) {{ {nodes} }}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    graph = simplify(graph_from_onnx(model))
    x = RANDOM.standard_normal((3, 5, 8)).astype(np.float32)
    np.testing.assert_allclose(runtime(graph, {"x": x})["y"], run(graph, {"x": x})["y"], rtol=1e-5, atol=1e-5)
