"""Tests of the importer: batch, shapes, shape arithmetic, and refused models."""
import re

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime import InferenceSession

from infer_server.cli.common import parse_shape
from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ops.reference import run

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def model(nodes, shape, opset=17, constants=None, output="y", out_shape=None):
    graph = helper.make_graph(nodes, "m", [helper.make_tensor_value_info("x", FLOAT, shape)],
                              [helper.make_tensor_value_info(output, FLOAT, out_shape)],
                              [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs.split(), outputs.split(), **attrs)


def test_a_view_by_size_becomes_one_reshape_with_a_resolved_target():
    nodes = [node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Unsqueeze", "n axes", "n1"),
             node("Concat", "n1 rest", "target", axis=0), node("Reshape", "x target", "y")]
    graph = graph_from_onnx(model(nodes, ["N", 3, 4], constants={"zero": 0, "axes": [0], "rest": [-1]}))
    assert [n.op for n in graph.nodes] == ["Reshape"]
    assert graph.nodes[0].attrs["shape"] == ("batch", 12)
    assert graph.shape("y") == ("batch", 12)


def test_a_target_may_multiply_the_batch():
    nodes = [node("Shape", "x", "s"), node("Slice", "s zero one", "n"), node("Mul", "n three", "m"),
             node("Concat", "m four", "target", axis=0), node("Reshape", "x target", "y")]
    constants = {"zero": [0], "one": [1], "three": [3], "four": [4]}
    graph = graph_from_onnx(model(nodes, ["N", 3, 4], constants=constants))
    assert graph.shape("y") == ("3*batch", 4)
    assert run(graph, {"x": np.zeros((5, 3, 4), np.float32)})["y"].shape == (15, 4)


@pytest.mark.parametrize("things", [5, 100])
def test_how_many_pairs_there_are_follows_from_a_matrix_of_all_of_them_however_large(things):
    """PyTorch exports tril_indices this way: 100 rows make 10,000 elements, above the limit for folding."""
    nodes = [node("Shape", "x", "s"), node("Concat", "s s", "square", axis=0),
             node("ConstantOfShape", "square", "zeros"), node("Add", "zeros one", "ones"),
             node("Trilu", "ones below", "lower", upper=0), node("NonZero", "lower", "at"), node("Gather", "x at", "y")]
    graph = graph_from_onnx(model(nodes, [things], constants={"one": np.float32(1), "below": -1}))
    assert graph.shape("y") == (2, things * (things - 1) // 2)


@pytest.mark.parametrize("sums", [60, 1500])
def test_whether_a_value_is_known_is_asked_of_each_tensor_once(sums):
    """Two paths through each sum make 2**sums paths."""
    nodes = [node("Sigmoid", "x", "t0")]
    for i in range(sums):
        nodes += [node("Relu", f"t{i}", f"r{i}"), node("Add", f"t{i} r{i}", f"t{i + 1}")]
    with pytest.raises(ModelError, match="NonZero"):
        graph_from_onnx(model([*nodes, node("NonZero", f"t{sums}", "y")], [4]))


def test_a_cut_that_ends_beyond_any_batch_leaves_the_batch_whole():
    """tf2onnx writes 10**9 as the end of every axis."""
    cut = {"starts": [0, 1], "ends": [10**9, 10**9]}
    graph = graph_from_onnx(model([node("Slice", "x starts ends", "y")], ["N", 4], constants=cut))
    assert graph.shape("y") == ("batch", 3)
    with pytest.raises(ModelError, match="must be fixed here"):
        graph_from_onnx(model([node("Slice", "x starts ends", "y")], ["N", 4], constants={**cut, "ends": [9, 9]}))


@pytest.mark.parametrize("extent", ["N", None, -1, "unk__7"])
def test_every_way_to_write_an_unknown_leading_extent_is_the_batch(extent):
    assert graph_from_onnx(model([node("Relu", "x", "y")], [extent, 3])).shape("y") == ("batch", 3)


@pytest.mark.parametrize("nameless", ["?", "-1", "None", "*"])
def test_a_name_that_stands_for_anything_is_no_symbol(nameless):
    """Two extents with such a name may differ."""
    relu = model([node("Relu", "x", "y")], [nameless, 3, nameless, nameless])
    assert graph_from_onnx(relu, shapes={"x": (None, 3, 48, 192)}).shape("y") == ("batch", 3, 48, 192)


def test_a_fixed_batch_stays_fixed():
    assert graph_from_onnx(model([node("Relu", "x", "y")], [1, 3])).shape("y") == (1, 3)


def test_a_symbolic_width_is_refused_with_the_option_that_gives_it():
    with pytest.raises(ModelError, match=r"'x' \[N, 3, 48, W\] .*--shape x:batchx3x48xW with sizes for the names$"):
        graph_from_onnx(model([node("Relu", "x", "y")], ["N", 3, 48, "W"]))


def test_all_missing_shapes_are_asked_for_at_once_without_sizes_that_nobody_tried():
    inputs = {"ids": ["N", "T"], "x": ["N", "T", None], "image": ["N", 3, "H", "W"], "known": ["N", 4], "any": None}
    graph = helper.make_graph([node("Relu", "known", "y")], "m",
                              [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
                              [helper.make_tensor_value_info("y", FLOAT, None)])
    with pytest.raises(ModelError) as error:
        graph_from_onnx(helper.make_model(graph))
    options = re.findall(r"--shape (\S+)", str(error.value))
    assert options == ["ids:batchxT", "x:batchxTxSIZE2", "image:batchx3xHxW", "any:batchx3xHEIGHTxWIDTH"]
    assert "'x' [N, T, ?]" in str(error.value) and "'any' of unknown rank" in str(error.value)
    shapes = dict(parse_shape(re.sub("T|SIZE2|HEIGHT|WIDTH|H|W", "128", option)) for option in options)
    assert graph_from_onnx(helper.make_model(graph), shapes=shapes).shape("x") == ("batch", 128, 128)


def test_an_input_that_no_machine_can_hold_is_refused_before_anything_is_allocated():
    with pytest.raises(ModelError, match=r"input 'x' float32\[1000000,3000000\] takes 12000.0 GB, and this machine"):
        graph_from_onnx(model([node("Relu", "x", "y")], [10 ** 6, 3 * 10 ** 6]))


@pytest.mark.parametrize(("op", "inputs", "constants"), [
    ("Expand", "x c", {"c": [10 ** 9, 10 ** 6]}), ("Tile", "x c", {"c": [10 ** 7, 10 ** 7]}),
    ("ConstantOfShape", "c", {"c": [10 ** 8, 10 ** 8]}), ("Pad", "x c", {"c": [0, 0, 10 ** 12, 10 ** 9]}),
    ("Range", "c d e", {"c": 0, "d": 10 ** 15, "e": 1}), ("HannWindow", "c", {"c": 10 ** 15}),
    ("Resize", "x  scales", {"scales": np.float32([1e9, 1e9])})])
def test_a_constant_or_tensor_that_explodes_is_refused_with_its_name_and_bytes(op, inputs, constants):
    exploding = helper.make_node(op, inputs.split(" "), ["big"], name="far")
    with pytest.raises(ModelError, match=rf"node 'far' \({op}\): 'big' \w+\[.*\] takes .* GB, and this machine has"):
        graph_from_onnx(model([exploding, node("Identity", "big", "y")], [1, 1], constants=constants))


def test_a_given_shape_fills_in_the_width():
    graph = graph_from_onnx(model([node("Relu", "x", "y")], ["N", 3, 48, "W"]), shapes={"x": (None, 3, 48, 320)})
    assert graph.shape("y") == ("batch", 3, 48, 320)


def test_a_given_shape_cannot_contradict_the_model():
    with pytest.raises(ModelError, match="does not match the declared"):
        graph_from_onnx(model([node("Relu", "x", "y")], ["N", 3]), shapes={"x": (1, 4)})


def test_old_and_new_forms_of_an_operator_become_the_same_node():
    old = graph_from_onnx(model([node("Squeeze", "x", "y", axes=[1])], ["N", 1, 3], opset=11))
    new = graph_from_onnx(model([node("Squeeze", "x a", "y")], ["N", 1, 3], opset=13, constants={"a": [1]}))
    assert dict(old.nodes[0].attrs) == dict(new.nodes[0].attrs) == {"axes": (1,)}


def test_a_softmax_before_opset_13_is_over_all_axes_from_its_axis_on():
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    graph = graph_from_onnx(model([node("Softmax", "x", "y", axis=1)], ["N", 3, 4], opset=11))
    np.testing.assert_allclose(run(graph, {"x": x})["y"].sum(axis=(1, 2)), 1, rtol=1e-6)


def test_all_unknown_operators_are_named_at_once():
    nodes = [node("Foo", "x", "a", domain="custom"), node("Bar", "a", "y", domain="custom")]
    with pytest.raises(ModelError, match=r"custom\.Bar .*custom\.Foo"):
        graph_from_onnx(model(nodes, ["N", 3]))


def test_an_operator_that_we_do_not_write_runs_on_the_onnx_package():
    graph = graph_from_onnx(model([node("Hardmax", "x", "y", axis=1)], ["N", 3]))
    result = run(graph, {"x": np.array([[1, 3, 2]], np.float32)})["y"]
    np.testing.assert_array_equal(result, [[0, 1, 0]])


def test_a_file_that_is_no_model_is_refused_by_name(tmp_path):
    for content in (b"", b"no model at all", model([node("Relu", "x", "y")], [1]).SerializeToString()[:-7]):
        (tmp_path / "bad.onnx").write_bytes(content)
        with pytest.raises(ModelError, match=r"bad\.onnx"):
            graph_from_onnx(tmp_path / "bad.onnx")
    with pytest.raises(ModelError, match=r"absent\.onnx"):
        graph_from_onnx(tmp_path / "absent.onnx")


def test_external_data_is_read_from_beside_the_model(tmp_path):
    weights = np.arange(4096, dtype=np.float32).reshape(1, 4096)
    proto = model([node("Add", "x w", "y")], ["N", 4096], constants={"w": weights})
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    np.testing.assert_array_equal(graph_from_onnx(tmp_path / "m.onnx").constants["w"], weights)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match=r"m\.onnx: the external data of the weights .*w\.bin.*; put the files"):
        graph_from_onnx(tmp_path / "m.onnx")


def test_a_node_whose_inputs_do_not_fit_is_named():
    proto = model([node("Add", "x w", "y", name="sum")], ["N", 3], constants={"w": np.zeros(4, np.float32)})
    with pytest.raises(ModelError, match="node 'sum' .*do not broadcast"):
        graph_from_onnx(proto)


def test_an_average_over_what_is_inside_of_the_pads_has_no_window_that_is_larger():
    pool = node("AveragePool", "x", "y", kernel_shape=[3, 2], strides=[2, 4], count_include_pad=1)
    assert graph_from_onnx(model([pool], [1, 1, 4, 1], 17)).shape("y") == (1, 1, 1, 1)
    with pytest.raises(ModelError, match="a window of 2 does not fit an extent of 1"):
        graph_from_onnx(model([pool], [1, 1, 4, 1], 19))


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_a_pool_of_nothing_is_refused(op):
    with pytest.raises(ModelError):
        graph_from_onnx(model([node(op, "x", "y", kernel_shape=[1, 1], strides=[2, 2])], [1, 1, 0, 4]))


@pytest.mark.parametrize("text", [b"relu", b"Relu", b"tensor", b"y_out"])
def test_a_name_that_is_no_utf8_is_said_to_be_damage(tmp_path, text):
    graph = model([helper.make_node("Relu", ["x"], ["tensor"], name="relu"), node("Abs", "tensor", "y_out")], ["N", 3],
                  output="y_out")
    (tmp_path / "m.onnx").write_bytes(graph.SerializeToString().replace(text, b"\xff" * len(text)))
    with pytest.raises(ModelError, match=r"has a name that is not valid UTF-8: b'.xff"):
        graph_from_onnx(tmp_path / "m.onnx")


def test_an_attribute_that_is_no_utf8_is_named(tmp_path):
    einsum = node("Einsum", "x", "y", equation="CRD")
    (tmp_path / "m.onnx").write_bytes(model([einsum], ["N", 4, 2, 2]).SerializeToString().replace(b"CRD", b"\xff" * 3))
    with pytest.raises(ModelError, match=r"\(Einsum\): attribute 'equation' cannot be read: 'utf-8' codec"):
        graph_from_onnx(tmp_path / "m.onnx")


def with_rate(dtype, shape):
    """Return y = x * rate, where rate is an input."""
    graph = helper.make_graph([node("Cast", "rate", "real", to=FLOAT), node("Mul", "x real", "y")], "m",
                              [helper.make_tensor_value_info("x", FLOAT, ["N", 2]),
                               helper.make_tensor_value_info("rate", dtype, shape)],
                              [helper.make_tensor_value_info("y", FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("dtype", [FLOAT, INT64, onnx.TensorProto.UINT8, onnx.TensorProto.DOUBLE])
@pytest.mark.parametrize("shape, value", [([], 3), ([1], 3), ([1], [3]), ([2], [3, 4]), (["M"], [3]), (None, 3)])
def test_an_input_may_be_a_number_or_a_list_of_them_in_the_declared_type(dtype, shape, value):
    graph = graph_from_onnx(with_rate(dtype, shape), constants={"rate": value})
    assert graph.inputs == ("x",)
    y = run(graph, {"x": np.ones((1, 2), np.float32)})["y"]
    np.testing.assert_array_equal(y, np.broadcast_to(np.float32(value), (1, 2)))


@pytest.mark.parametrize("dtype, shape, value", [
    (INT64, [], 0.5), (INT64, [2], 3), (INT64, [2], [1, 2, 3]), (INT64, [], "three"), (FLOAT, [], np.float64(1))])
def test_a_number_that_the_declared_type_does_not_have_is_refused(dtype, shape, value):
    with pytest.raises(ModelError, match="given for input 'rate' does not match the declared"):
        graph_from_onnx(with_rate(dtype, shape), constants={"rate": value})


def test_nodes_out_of_order_are_put_in_order_and_a_circle_is_refused():
    """A branch may read tensors that are defined later in the file, too."""
    inner = helper.make_graph([node("Add", "u one", "v"), node("Abs", "b", "u")], "then", [],
                              [helper.make_tensor_value_info("v", FLOAT, None)])
    other = helper.make_graph([node("Neg", "b", "w")], "else", [], [helper.make_tensor_value_info("w", FLOAT, None)])
    branched = helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=other)
    nodes = [branched, node("Mul", "a a", "b"), node("Sub", "x one", "a")]
    constants = {"yes": True, "one": np.float32(1)}
    graph = graph_from_onnx(model(nodes, [2], constants=constants))
    assert [n.op for n in graph.nodes] == ["Sub", "Mul", "Abs", "Add", "Identity"]
    with pytest.raises(ModelError, match="node 'b' \\(Mul\\): input 'y' is not produced by any node before it"):
        graph_from_onnx(model([node("Mul", "x y", "b"), node("Sub", "x b", "y")], [2]))


@pytest.mark.parametrize("indices", [[1, 5], [[0, 1], [1, 2]]])
def test_sparse_constants_are_written_out_with_their_zeros(indices):
    sparse = helper.make_sparse_tensor(numpy_helper.from_array(np.float32([7, 8]), "w"),
                                       numpy_helper.from_array(np.array(indices)), [2, 3])
    of_initializer = model([node("Add", "x w", "y")], [2, 3])
    of_initializer.graph.sparse_initializer.append(sparse)
    of_node = model([node("Constant", "", "w", sparse_value=sparse), node("Add", "x w", "y")], [2, 3])
    for given in (of_initializer, of_node):
        result = run(graph_from_onnx(given), {"x": np.ones((2, 3), np.float32)})["y"]
        np.testing.assert_array_equal(result, [[1, 8, 1], [1, 1, 9]])
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1, 6])))
    with pytest.raises(ModelError, match="sparse tensor 'w' cannot be read: index 6 is out of bounds"):
        graph_from_onnx(model([node("Constant", "", "w", sparse_value=sparse), node("Add", "x w", "y")], [2, 3]))


def test_a_hardmax_before_opset_13_is_over_all_axes_from_its_axis_on():
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    result = run(graph_from_onnx(model([node("Hardmax", "x", "y")], [2, 3, 4], opset=11)), {"x": x})["y"]
    np.testing.assert_array_equal(result.reshape(2, 12).argmax(1), x.reshape(2, 12).argmax(1))
    assert result.sum() == 2


def test_a_call_of_a_function_that_leaves_an_attribute_out_means_its_default():
    """Functions that other functions call are included."""
    slope = helper.make_node("LeakyRelu", ["a"], ["b"])
    slope.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    leaky = helper.make_function("f", "Leaky", ["a"], ["b"], [slope], [helper.make_opsetid("", 17)],
                                 attribute_protos=[helper.make_attribute("slope", 0.5)])
    calls = [helper.make_node("Leaky", ["c"], ["d"], domain="f"),
             helper.make_node("Leaky", ["d"], ["e"], domain="f", slope=0.25)]
    twice = helper.make_function("f", "Twice", ["c"], ["e"], calls, [helper.make_opsetid("f", 1)])
    proto = model([helper.make_node("Twice", ["x"], ["y"], domain="f")], [1])
    proto.functions.extend([leaky, twice])
    proto.opset_import.append(helper.make_opsetid("f", 1))
    assert run(graph_from_onnx(proto), {"x": np.float32([-8])})["y"] == -1


def _calling(made, opset):
    """Return a model of opset 17 that calls a function of this node, which is of another opset."""
    function = helper.make_function("f", "F", ["a"], ["b"], [made], [helper.make_opsetid("", opset)])
    proto = model([helper.make_node("F", ["x"], ["y"], domain="f")], [1])
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid("f", 1))
    return proto


@pytest.mark.parametrize("opset", [9, 13, 17, 20])
def test_a_function_may_be_of_another_opset_whose_operators_are_the_same(opset):
    proto = _calling(helper.make_node("LeakyRelu", ["a"], ["b"], alpha=0.5), opset)
    assert run(graph_from_onnx(proto), {"x": np.float32([-8])})["y"] == -4
    assert proto.functions[0].opset_import[0].version == opset, "the caller's own is left as it is"


@pytest.mark.parametrize("made, opset", [
    (helper.make_node("Softmax", ["a"], ["b"]), 11),                # along another axis, unless it is said
    (helper.make_node("Squeeze", ["a"], ["b"], axes=[0]), 11),      # the axes are an input now
    (helper.make_node("RoiAlign", ["a", "a", "a"], ["b"]), 10),     # pixels had their corners at integers
    (helper.make_node("PRelu", ["a", "a"], ["b"]), 6),              # slopes of channels, without extents behind them
    (helper.make_node("Dropout", ["a"], ["b"]), 7),                 # a mask of floats
    (helper.make_node("Upsample", ["a", "a"], ["b"]), 9),           # there is none any more
    (helper.make_node("Gelu", ["a"], ["b"]), 20)])                  # there was none yet
def test_a_function_of_another_opset_whose_operators_are_others_is_refused(made, opset):
    with pytest.raises(ModelError, match=f"f.F is written in opset {opset}, where {made.op_type} is another operator"):
        graph_from_onnx(_calling(made, opset))


def test_a_function_that_is_called_in_a_default_of_its_own_is_read():
    def kind(name):
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1])

    inner = helper.make_graph([helper.make_node("F", ["x0"], ["z"], domain="f")], "inner", [], [kind("z")])
    proto = model([helper.make_node("F", ["x"], ["y"], domain="f")], [1])
    proto.functions.append(helper.make_function(
        "f", "F", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], [helper.make_opsetid("", 17)],
        attribute_protos=[helper.make_attribute("g", inner)]))
    proto.opset_import.append(helper.make_opsetid("f", 1))
    assert run(graph_from_onnx(proto), {"x": np.float32([-8])})["y"] == 0


def test_an_output_that_is_listed_twice_is_one():
    proto = model([node("Relu", "x", "y")], [1])
    proto.graph.output.append(proto.graph.output[0])
    assert graph_from_onnx(proto).outputs == ("y",)


def test_what_keeps_its_proportions_has_one_scale_though_its_extents_are_rounded():
    """5 rows times 4/3 are 7, with a step of 3/4 row, not 5/7, as in ONNX Runtime; the export keeps it."""
    resize = helper.make_node("Resize", ["x", "", "", "size"], ["y"], mode="linear", axes=[2, 3],
                              keep_aspect_ratio_policy="not_larger")
    proto = model([resize], [1, 1, 5, 9], opset=19, constants={"size": np.array([8, 12])})
    proto.ir_version = 9
    graph, x = graph_from_onnx(proto), np.arange(45, dtype=np.float32).reshape(1, 1, 5, 9)
    wanted, = InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    assert wanted.shape == (1, 1, 7, 12)
    again = InferenceSession(onnx_from_graph(graph).SerializeToString()).run(None, {"x": x})[0]
    for found in (run(graph, {"x": x})["y"], again):
        np.testing.assert_allclose(found, wanted, 1e-5)


@pytest.mark.parametrize(("axis", "size", "policy", "shape"), [
    (3, 12, "not_larger", (1, 2, 5, 12)), (2, 2, "not_smaller", (1, 2, 2, 9)), (2, 3, "not_larger", (1, 2, 3, 9))])
def test_what_keeps_the_proportions_of_one_axis_leaves_the_other(axis, size, policy, shape):
    """The export keeps it, too."""
    resize = helper.make_node("Resize", ["x", "", "", "size"], ["y"], mode="linear", axes=[axis],
                              keep_aspect_ratio_policy=policy)
    proto = model([resize], [1, 2, 5, 9], opset=19, constants={"size": np.array([size])})
    proto.ir_version = 9
    graph, x = graph_from_onnx(proto), np.arange(90, dtype=np.float32).reshape(1, 2, 5, 9)
    wanted, = InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    assert wanted.shape == shape
    again = InferenceSession(onnx_from_graph(graph).SerializeToString()).run(None, {"x": x})[0]
    for found in (run(graph, {"x": x})["y"], again):
        np.testing.assert_allclose(found, wanted, 1e-5)
