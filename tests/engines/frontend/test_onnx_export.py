"""An exported model gives the reference's results in ONNX Runtime."""
import importlib.util
import subprocess
import sys

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from benchmarks.zoo.pictures import feeds_for
from benchmarks.zoo.workloads import WORKLOADS
from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir.graph import Graph, Node, QParams, TensorType, type_of, verify
from infer_server.engines.machine.cpu import detect
from infer_server.engines.ops.reference import run
from infer_server.engines.passes.pipeline import optimise, simplify
from infer_server.engines.passes.quantization.quantize import edges_to_calibrate, quantize
from tests.zoo import TINY, images_for, run_onnx

RANDOM = np.random.default_rng(0)
F32 = np.dtype(np.float32)
U8 = QParams((0.05,), (128,), "uint8")
OTHER_ROUNDING_DB = 20      # least SQNR of deep, narrow INT8 models; a wrong operator leaves less than 10 dB


def runtime(graph, feeds):
    model = onnx_from_graph(graph).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return dict(zip(graph.outputs, session.run(list(graph.outputs), feeds), strict=True))


def channels_last_graph(quantised):
    """Return x -> NHWC -> Fused(Conv, Add of channels, Clip per channel, Add of itself) -> pool -> concat -> NCHW y."""
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
    """The pass that transposes such keys and the export must choose different names."""
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


# ---- what other runtimes make of it
def quantised(model, feeds):
    """Return the model's INT8 graph with the ranges of one run on the feeds."""
    graph = optimise(simplify(graph_from_onnx(model)))
    edges = edges_to_calibrate(graph)
    seen = run(graph, feeds, edges)
    return quantize(graph, {name: (float(seen[name].min()), float(seen[name].max())) for name in edges})


def tiny(name):
    """Return the INT8 graph of a zoo model, and pictures."""
    model = TINY[name]()
    feeds = {"input": images_for(model, 4)}
    return quantised(model, feeds), feeds


def parsed(nodes):
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 19]> m (float[N,8,6,6] x) => (float[N,K,L,M] y) {{ {nodes} }}')


SHUFFLE = """apart = Constant<value = int64[5] {0,2,4,6,6}>()  whole = Constant<value = int64[4] {0,8,6,6}>()
    groups = Reshape(x, apart)  swapped = Transpose<perm = [0,2,1,3,4]>(groups)  y = Reshape(swapped, whole)"""
JOINED = """pooled = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(x)
    both = Concat<axis = 1>(x, pooled)  r = Relu(both)  y = Conv(r, w)"""


def exact_in_peers():
    """Skip if the peers' integer kernels are inexact on this CPU.

    Without dot products of bytes they add two products in 16 bits, which saturate.
    """
    cpu = detect()
    if cpu.architecture == "x86_64" and not {"avx512_vnni", "avx_vnni"} & cpu.features:
        pytest.skip(f"{cpu.model} has no VNNI: integer kernels of ONNX Runtime and OpenVINO saturate on it")


@pytest.mark.parametrize("name", ["resnet50_d", "inception_v3", "densenet", "googlenet_lrn", "mobilenet_v3",
                                  "shufflenet_v1", "shufflenet_v2_by_slices", "yolo_v5", "nanodet", "unet", "deeplab",
                                  "super_resolution", "decoder", "activations", "pointwise", "views", "layout_traps"])
def test_onnx_runtime_takes_an_int8_model_without_and_with_its_default_optimisations(name):
    """ONNX Runtime used to fuse the quantised AveragePool into one without dilations, and refuse the model."""
    graph, feeds = tiny(name)
    model = onnx_from_graph(graph)
    onnx.checker.check_model(model, full_check=True)
    # Sums in another order move single values by a step, and its own fusions hold biases in int32.
    wanted = run(graph, feeds)
    for optimised in (False, True):
        values = run_onnx(model, feeds, optimised=optimised)
        if optimised:
            exact_in_peers()
        for output, expected in wanted.items():
            assert sqnr_db(expected, values[output]) > OTHER_ROUNDING_DB, (output, optimised)


@pytest.mark.parametrize("in_bytes", [False, True])
def test_volumes_are_written_channels_first_like_images(in_bytes):
    """Write volumes channels first: no runtime reads a model that transposes them as if they were images."""
    model = WORKLOADS["unet3d"].tiny()
    feeds = feeds_for(model)
    graph = quantised(model, feeds) if in_bytes else optimise(simplify(graph_from_onnx(model)))
    exported = onnx_from_graph(graph)
    onnx.checker.check_model(exported, full_check=True)
    assert all(len(node.attribute[0].ints) == 5 for node in exported.graph.node if node.op_type == "Transpose")
    (expected,), (found,) = run(graph, feeds).values(), run_onnx(exported, feeds, optimised=False).values()
    assert sqnr_db(expected, found) > (OTHER_ROUNDING_DB if in_bytes else 100)


@pytest.mark.parametrize("name", ["densenet", "shufflenet_v1", "shufflenet_v2"])
def test_openvino_computes_the_same_and_does_not_crash(name, tmp_path):
    """OpenVINO, an extra of 180 MB that only benchmarks need, runs in its own process, since it may crash."""
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("openvino is not installed; pip install '.[bench]' has it")
    graph, feeds = tiny(name)
    onnx.save(onnx_from_graph(graph), tmp_path / "m.onnx")
    np.savez(tmp_path / "feeds.npz", **feeds)
    script = ("import sys, numpy, openvino\n"
              "compiled = openvino.Core().compile_model(sys.argv[1], 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})\n"
              "numpy.save(sys.argv[3], compiled(dict(numpy.load(sys.argv[2])))[0])")
    files = [str(tmp_path / file) for file in ("m.onnx", "feeds.npz", "y.npy")]
    subprocess.run([sys.executable, "-c", script, *files], check=True, timeout=120)
    exact_in_peers()
    assert sqnr_db(run(graph, feeds)["output"], np.load(files[2])) > OTHER_ROUNDING_DB


def test_attributes_that_say_the_default_are_not_written():
    """Window attributes whose default is in no schema are not written either; other values stay."""
    model = parsed("""a = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1], dilations = [1,1], strides = [1,1],
        count_include_pad = 0>(x)  y = LeakyRelu<alpha = 0.5>(a)""")
    written = {node.op_type: {a.name for a in node.attribute} for node in
               onnx_from_graph(simplify(graph_from_onnx(model))).graph.node}
    assert written == {"AveragePool": {"kernel_shape", "pads"}, "LeakyRelu": {"alpha"}}


def test_a_concat_of_equally_quantised_tensors_joins_integers():
    """OpenVINO 2026.4 crashes on a float Concat that is quantised, and on one followed by a Relu."""
    x = RANDOM.standard_normal((2, 8, 6, 6)).astype(np.float32)
    joined = parsed(JOINED)
    joined.graph.initializer.append(onnx.numpy_helper.from_array(
        RANDOM.standard_normal((4, 16, 1, 1)).astype(np.float32), "w"))
    graph = quantised(joined, {"x": x})
    model = onnx_from_graph(graph)
    concat = next(node for node in model.graph.node if node.op_type == "Concat")
    producers = {node.output[0]: node.op_type for node in model.graph.node}
    assert [producers[name] for name in concat.input] == ["QuantizeLinear", "QuantizeLinear"]
    # ONNX Runtime dequantises the operands and sums in float: an integer that is one off would differ by 1e-2.
    np.testing.assert_allclose(run_onnx(model, {"x": x}, optimised=False)["y"], run(graph, {"x": x})["y"], atol=1e-5)


def test_a_shuffle_of_channels_is_written_as_one_and_not_as_a_gather():
    """OpenVINO 2026.4 computes a convolution after a Gather of channels wrongly."""
    graph = optimise(simplify(graph_from_onnx(parsed(SHUFFLE))))
    assert "Gather" in {node.op for node in graph.nodes}
    model = onnx_from_graph(graph)
    assert [node.op_type for node in model.graph.node] == ["Reshape", "Transpose", "Reshape"]
    x = RANDOM.standard_normal((2, 8, 6, 6)).astype(np.float32)
    np.testing.assert_array_equal(run_onnx(model, {"x": x})["y"], run(graph, {"x": x})["y"])


@pytest.mark.parametrize("indices", [
    [1, 0, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 1, 5, 2, 6, 3], [0, 2, 4, 6, 1, 3, 5]])
def test_a_gather_of_other_channels_stays_one_and_works_channels_first(indices):
    """A neighbouring MaxPool makes its input channels first."""
    model = parsed("p = MaxPool<kernel_shape = [2,2]>(x)  g = Gather<axis = 1>(p, indices)  "
                   "y = MaxPool<kernel_shape = [2,2]>(g)")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(indices, np.int64), "indices"))
    graph = optimise(simplify(graph_from_onnx(model)))
    exported = onnx_from_graph(graph)
    assert [node.op_type for node in exported.graph.node] == ["MaxPool", "Gather", "MaxPool"]
    x = RANDOM.standard_normal((2, 8, 6, 6)).astype(np.float32)
    np.testing.assert_array_equal(run_onnx(exported, {"x": x})["y"], run_onnx(model, {"x": x})["y"])
