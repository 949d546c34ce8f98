"""Models of one node compiled to nests: every step is a kernel, with the reference's results."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.ops import reference
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.small_models import node, small_model
from tests.engines.frontend.ml.test_trees import COLUMNS, forest

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """Node and its inputs. open: number of inputs with a leading batch axis."""
    node: onnx.NodeProto
    inputs: tuple[Array, ...]
    open: int = 0
    tolerance: float = 1e-5


def floats(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ints(top: int, *shape: int, dtype: str = "int64", low: int = 0) -> Array:
    return np.random.default_rng(1).integers(low, top, shape).astype(dtype)


# Places in a result of [2, 3, 9, 12], none of them twice.
UNPOOLED = np.random.default_rng(3).permutation(2 * 3 * 9 * 12)[:180].reshape(2, 3, 5, 6)
# Operators whose inputs behind the first are constants.
BY_CONSTANTS = ("Slice", "Split", "Pad", "Tile", "CumSum", "Resize", "TopK", "Col2Im")


def model_of(case: Case) -> onnx.ModelProto:
    infos, constants = [], []
    for i, (name, array) in enumerate(zip(filter(None, case.node.input), case.inputs, strict=True)):
        if i and case.node.op_type in BY_CONSTANTS:
            constants.append(numpy_helper.from_array(np.asarray(array), name))
            continue
        shape = ["N", *array.shape[1:]] if i < case.open else array.shape
        infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape))
    outputs = [helper.make_empty_tensor_value_info(name) for name in case.node.output if name]
    graph = helper.make_graph([case.node], "one", infos, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)],
                             ir_version=9)


def assert_compiled_and_right(case: Case) -> None:
    model = model_of(case)
    given = dict(zip(filter(None, case.node.input), case.inputs, strict=True))
    feeds = {info.name: given[info.name] for info in model.graph.input}
    assert_kernels_and_right(model, feeds, case.tolerance, max_batch=4 if case.open else None)


def assert_kernels_and_right(model: onnx.ModelProto, feeds: dict[str, Array], tolerance: float = 1e-5,
                             max_batch: int | None = None) -> None:
    builder = Builder(BuildConfig(timing=False, max_batch=max_batch))
    graph = builder.graph(model)
    engine = Engine(builder.plan(graph))
    assert [step.reason for step in engine.plan.machine.steps if step.fallback] == []
    found = engine.run(feeds)
    for name, wanted in reference.run(graph, feeds).items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape)
        if wanted.dtype.kind == "f":
            np.testing.assert_allclose(found[name], wanted, tolerance, tolerance)
        else:
            np.testing.assert_array_equal(found[name], wanted)


X = floats(3, 5, 7, 9)
CASES = {
    "reductions": [
        Case(node("ReduceSum", "x", "y", keepdims=0), (X,)),
        Case(node("ReduceL2", "x", "y", keepdims=0), (floats(3, 40, dtype="float64"),), 0),
        Case(node("ReduceLogSumExp", "x", "y"), (X,)),
        Case(node("ReduceProd", "x", "y"), (ints(4, 3, 5, 7, dtype="int32", low=1),)),
        Case(node("ReduceMax", "x", "y", keepdims=0), (ints(9, 3, 50, dtype="uint8"),)),
        Case(node("ReduceLogSumExp", "x", "y"), (ints(9, 3, 50, dtype="int32"),)),
        Case(node("ArgMin", "x", "y", axis=2, select_last_index=1, keepdims=0), (np.round(X),), 1),
        Case(node("ArgMax", "x", "y", axis=0), (np.round(floats(40, 3)),)),
        Case(node("Softmax", "x", "y", axis=1), (floats(3, 33, 9, dtype="float64"),), 1),
        Case(node("Hardmax", "x", "y", axis=1), (np.round(X),), 1),
        Case(node("LpNormalization", "x", "y", axis=1, p=1), (X,), 1),
        Case(node("LayerNormalization", "x w b", "y m i", axis=2), (X, floats(7, 9), floats(7, 9)), 1),
    ],
    "pointwise": [
        Case(node("Pow", "x e", "y"), (np.abs(X), floats(9))),
        Case(node("Pow", "x e", "y"), (ints(9, 37, dtype="int32", low=-9), ints(5, 9, 1, dtype="int32", low=-3))),
        Case(node("Pow", "x e", "y"), (np.int32([2**31 - 1, 1 - 2**31, -1, 1, 2]), np.int32([[-1], [-3]]))),
        Case(node("Pow", "x e", "y"), (ints(9, 37), np.float32([[2], [3], [0.5]]))),
        Case(node("Mod", "x e", "y", fmod=1), (X, floats(7, 1))),
        Case(node("Add", "x e", "y"), (floats(3, 5, dtype="float64"), floats(5, dtype="float64")), 1),
        Case(node("Less", "x e", "y"), (ints(9, 5, 1, dtype="uint16"), ints(9, 4, dtype="uint16"))),
        Case(node("Where", "c x e", "y"), (X > 0, floats(9, dtype="float64"), floats(3, 5, 7, 9, dtype="float64"))),
        Case(node("BitShift", "x e", "y", direction="LEFT"), (ints(9, 20, dtype="uint8"), ints(9, 20, dtype="uint8"))),
        Case(node("Cast", "x", "y", to=onnx.TensorProto.INT16), (X * 100,), 1),
        Case(node("Cast", "x", "y", to=onnx.TensorProto.UINT16), (np.float32([-0.5, -1.5, 65535.5, 7e4, -1e9]),)),
        Case(node("Atan", "x", "y"), (X,), 1), Case(node("Sign", "x", "y"), (np.round(X),), 1),
        Case(node("IsInf", "x", "y", detect_negative=0), (np.float32([1, np.inf, -np.inf, np.nan]),)),
        Case(node("Exp", "x", "y"), (floats(3, 19, dtype="float64"),), 1),
    ],
    "gathers and scatters": [
        Case(node("Gather", "x i", "y", axis=2), (X, ints(7, 2, 4, low=-7)), 1),
        Case(node("Gather", "x i", "y", axis=0), (floats(40, 19), ints(40, 3, 6, dtype="int32", low=-40))),
        Case(node("GatherElements", "x i", "y", axis=0), (X, ints(3, 2, 5, 7, 8, low=-3))),
        Case(node("GatherND", "x i", "y", batch_dims=1), (X, ints(5, 3, 4, 2, low=-5)), 2),
        Case(node("GatherND", "x i", "y"), (ints(9, 6, 7, dtype="int8"), ints(6, 5, 2))),
        Case(node("ScatterElements", "x i u", "y", axis=1), (X, np.argsort(X, 1)[:, :2], floats(3, 2, 7, 9))),
        Case(node("ScatterElements", "x i u", "y", axis=0, reduction="add"),
             (floats(11, 19), ints(11, 50, 19), floats(50, 19))),
        Case(node("ScatterND", "x i u", "y", reduction="max"), (floats(11, 19), ints(11, 50, 1), floats(50, 19))),
        Case(node("ScatterND", "x i u", "y"), (floats(4, 5, 6), np.int64([[[0, 1], [3, 4]], [[2, 2], [-1, 0]]]),
                                             floats(2, 2, 6))),
    ],
    "movement": [
        Case(node("Slice", "x s e a t", "y"), (X, *map(np.int64, ([2, -1], [0, -99], [0, 3], [-1, -2])))),
        Case(node("Split", "x s", "a b"), (X, np.int64([1, 2]))),
        Case(node("Pad", "x p", "y", mode="reflect"), (X, np.int64([0, 0, 3, -2, 0, 0, 5, 8]))),
        Case(node("Pad", "x p", "y", mode="edge"), (X, np.int64([1, 0, 0, 2, 0, 3, 0, 0]))),
        Case(node("Pad", "x p", "y", mode="wrap"), (X, np.int64([0, 0, 0, 2, 0, 0, 0, 30]))),
        Case(node("Pad", "x p v", "y"), (ints(9, 4, 5), np.int64([1, -1, 2, 3]), np.int64(7))),
        Case(node("Tile", "x r", "y"), (ints(9, 4, 5, dtype="uint16"), np.int64([2, 3]))),
        Case(node("Trilu", "x", "y", upper=0), (floats(3, 6, 5),), 1),
        Case(node("Concat", "a b", "y", axis=0), (floats(3, 5), floats(4, 5))),
        Case(node("CumSum", "x a", "y", reverse=1, exclusive=1), (floats(6, 5, dtype="float64"), np.int64(0))),
        Case(node("CumSum", "x a", "y", reverse=1), (floats(5, 70), np.int64(0))),
        Case(node("ReverseSequence", "x l", "y", batch_axis=0, time_axis=1), (floats(3, 6, 5), np.int64([6, 1, 3]))),
    ],
    "windows": [
        Case(node("Conv", "x w b", "y", pads=[1] * 6, strides=[2, 1, 1], dilations=[1, 2, 1], group=2),
             (floats(2, 4, 6, 7, 9), floats(6, 2, 3, 2, 3), floats(6)), 1),
        Case(node("Conv", "x w", "y", pads=[1, 0, 0, 1], group=3), (floats(2, 3, 6, 7), floats(6, 1, 3, 3))),
        Case(node("ConvTranspose", "x w", "y", strides=[2, 3], pads=[1, 0, 0, 1], group=2),
             (floats(2, 4, 5, 6), floats(4, 3, 3, 3)), 1),
        Case(node("Conv", "x w b", "y", pads=[1, 1, 1, 1]), (floats(2, 9, 6, 7), floats(11, 9, 3, 3), floats(11)), 1),
        Case(node("ConvTranspose", "x w b", "y", strides=[2, 1, 3], pads=[1, 0, 0, 1, 1, 0], output_padding=[1, 0, 2]),
             (floats(2, 4, 3, 2, 5), floats(4, 3, 3, 2, 2), floats(3)), 1),
        Case(node("ConvTranspose", "x w", "y", strides=[2, 2, 1], dilations=[2, 1, 1]),
             (floats(2, 4, 3, 2, 5), floats(4, 3, 3, 2, 2))),
        Case(node("Col2Im", "x i k", "y", pads=[1, 0, 1, 1], strides=[2, 1]),
             (floats(2, 12, 15), np.int64([4, 6]), np.int64([2, 3]))),
        Case(node("Col2Im", "x i k", "y", dilations=[1, 2]),
             (floats(2, 12, 15), np.int64([6, 7]), np.int64([2, 3])), 1),
        Case(node("MaxPool", "x", "y i", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 1, 0, 0]), (X,)),
        Case(node("MaxPool", "x", "y", kernel_shape=[2, 3, 2], dilations=[2, 1, 1]), (floats(2, 3, 5, 6, 19),), 1),
        Case(node("MaxUnpool", "x i", "y", kernel_shape=[2, 3], strides=[2, 2], pads=[0, 1, 1, 0]),
             (floats(2, 3, 5, 6), UNPOOLED)),
        Case(node("AveragePool", "x", "y", kernel_shape=[2, 2, 3], pads=[1, 0, 1, 0, 1, 1], ceil_mode=1,
                  strides=[2, 2, 2]), (floats(2, 3, 5, 6, 9),), 1),
        Case(node("MaxPool", "x", "y", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
             (ints(-50, 2, 3, 5, 6, dtype="int8", low=-90),), 1),
        Case(node("LpPool", "x", "y", kernel_shape=[2, 3], p=3), (X,), 1),
        Case(node("MaxPool", "x", "y", kernel_shape=[3, 2], strides=[2, 2]), (floats(2, 3, 2, 5),), 1),   # 2 of 3 rows
        Case(node("AveragePool", "x", "y", kernel_shape=[2, 4], strides=[1, 3], count_include_pad=1),
             (floats(2, 3, 5, 2),), 1),
        Case(node("AveragePool", "x", "y", kernel_shape=[2, 4], strides=[3, 3], count_include_pad=1, ceil_mode=1),
             (floats(2, 3, 4, 3),), 1),
        Case(node("ConvInteger", "x w z", "y", pads=[1, 1, 1, 1]),
             (ints(255, 2, 3, 5, 6, dtype="uint8"), ints(99, 4, 3, 3, 3, dtype="uint8"), np.uint8(7)), 1),
    ],
    "samples": [
        Case(helper.make_node("GridSample", ["x", "g"], ["y"], mode="bicubic", padding_mode="reflection"),
             (floats(2, 3, 6, 7), floats(2, 5, 19, 2))),
        Case(node("GridSample", "x g", "y", align_corners=1, mode="bilinear"),
             (floats(2, 3, 6, 7), floats(2, 5, 19, 2)), 2),
        Case(node("RoiAlign", "x r i", "y", output_height=3, output_width=5, sampling_ratio=2, spatial_scale=0.5),
             (floats(2, 3, 9, 11), np.float32([[1, 2, 14, 17], [-3, 0, 30, 9]]), np.int64([1, 0])), 0, 1e-4),
        Case(helper.make_node("Resize", ["x", "", "s"], ["y"], mode="cubic", antialias=1, exclude_outside=1),
             (floats(2, 3, 6, 7), np.float32([1, 1, 0.5, 2]))),
        Case(helper.make_node("Resize", ["x", "", "s"], ["y"], mode="linear",
                              coordinate_transformation_mode="align_corners"),
             (floats(2, 3, 5, 4, 6), np.float32([1, 1, 2, 1, 1.4])), 1),
        Case(node("TopK", "x k", "v i", axis=1, largest=0), (np.round(X), np.int64([3])), 1),
        Case(node("TopK", "x k", "v i", axis=0), (ints(9, 40, 3, dtype="uint8"), np.int64([7]))),
    ],
    "products": [
        Case(node("Gemm", "a b c", "y", alpha=0.5, beta=2.0, transA=1),
             (floats(33, 18, dtype="float64"), floats(33, 21, dtype="float64"), floats(21, dtype="float64"))),
        Case(node("MatMul", "a b", "y"), (floats(3, 1, 5, 33, dtype="float64"), floats(2, 33, 17, dtype="float64")), 1),
        Case(node("MatMul", "a b", "y"), (ints(99, 7, 9, dtype="int32"), ints(99, 9, 21, dtype="int32"))),
        Case(node("MatMul", "a b", "y"), (floats(33), floats(4, 33, 5))),
        Case(node("MatMul", "a b", "y"), (floats(4, 7, 33), floats(4, 33, 1)), 2),
        Case(node("MatMulInteger", "a b z", "y"), (ints(127, 5, 33, dtype="int8", low=-128),
                                                 ints(99, 33, 18, dtype="int8", low=-99), np.int8(9))),
        Case(node("Einsum", "a b", "y", equation="bhid,bhjd->bijh"), (floats(2, 3, 5, 8), floats(2, 3, 6, 8))),
        Case(node("Einsum", "a", "y", equation="...ii->...i"), (floats(2, 5, 5),)),
    ],
}


@pytest.mark.parametrize("family", CASES)
def test_nodes_of_a_family_are_kernels_and_right(family: str) -> None:
    for case in CASES[family]:
        try:
            assert_compiled_and_right(case)
        except Exception as error:
            error.add_note(f"{case.node.op_type} {[f'{x.dtype}{list(x.shape)}' for x in case.inputs]}")
            raise


def test_a_forest_is_one_kernel_and_right() -> None:
    """Trees are not full and inputs have missing values; one target and several."""
    x = np.where(ints(9, 5, COLUMNS) == 0, np.nan, floats(5, COLUMNS)).astype(np.float32)
    for targets in (1, 3):
        attrs = forest(modes=("BRANCH_LEQ", "BRANCH_LT", "BRANCH_EQ"), targets=targets, missing=True, trees=21)
        trees = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=targets, **attrs)
        assert_compiled_and_right(Case(trees, (x,), 1))


def test_long_ranges_are_kernels_and_right() -> None:
    """The range is longer than constants may be."""
    nodes, inputs, constants, feeds = [], [], [], {}
    for dtype, ends in {"float32": (0.5, 7000.5, 0.1), "int32": (70000, -70000, -2)}.items():
        names = [f"{dtype}_{end}" for end in ("start", "limit", "delta")]
        constants += [numpy_helper.from_array(np.asarray(end, dtype), name)
                      for end, name in zip(ends, names, strict=True)]
        nodes += [node("Range", " ".join(names), f"{dtype}_range"),
                  node("Add", f"{dtype} {dtype}_range", f"{dtype}_sum")]
        inputs.append(helper.make_tensor_value_info(dtype, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [1]))
        feeds[dtype] = np.ones(1, dtype)
    outputs = [helper.make_empty_tensor_value_info(f"{dtype}_sum") for dtype in feeds]
    graph = helper.make_graph(nodes, "ranges", inputs, outputs, constants)
    assert_kernels_and_right(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), feeds)


@pytest.mark.parametrize("window", [
    {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}, {"kernel_shape": [2, 2], "strides": [2, 2]},
    {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "dilations": [2, 2], "storage_order": 1}], ids=str)
def test_a_window_with_indices_begins_with_its_first_pixel_even_if_that_is_no_number(window: dict[str, Any]) -> None:
    """Pads are never the maximum, not even in windows of -inf."""
    session = pytest.importorskip("onnxruntime").InferenceSession
    x = floats(3, 2, 6, 6)
    x[0], x[1, :, ::2, ::2], x[2, :, 1:4] = -np.inf, np.nan, np.nan
    case = Case(node("MaxPool", "x", "y i", **window), (x,))
    expected = session(model_of(case).SerializeToString()).run(None, {"x": x})
    meant = reference.run(Builder(BuildConfig(timing=False)).graph(model_of(case)), {"x": x})
    for result, wanted in zip(meant.values(), expected, strict=True):
        np.testing.assert_array_equal(result, wanted)
    assert_compiled_and_right(case)


@pytest.mark.parametrize("shapes", [[(7, 9), (9,)], [(5, 7, 9), (1, 7, 9)], [(5, 1, 9), (5, 7, 1)]], ids=str)
def test_a_norm_has_other_scales_for_each_row(shapes: list[tuple[int, ...]]) -> None:
    constants = {name: floats(*shape, seed=seed) for seed, (name, shape) in enumerate(zip("sb", shapes, strict=True))}
    model = small_model([node("LayerNormalization", "x s b", "y", axis=2)], {"x": [5, 7, 9]}, ["y"], constants)
    assert_kernels_and_right(model, {"x": floats(5, 7, 9, seed=7)})


@pytest.mark.parametrize("dtype, low", [("float32", -87), ("float64", -700)])
def test_softplus_of_what_is_far_below_zero_has_the_digits_of_an_exponential(dtype: str, low: float) -> None:
    x = np.concatenate([np.linspace(low, 0, 997), [-np.inf]]).astype(dtype)
    model = model_of(Case(node("Softplus", "x", "y"), (x,)))
    builder = Builder(BuildConfig(timing=False))
    found = Engine(builder.plan(builder.graph(model))).run({"x": x})["y"]
    np.testing.assert_allclose(found, np.log1p(np.exp(x.astype(np.float64))), 4e-7 if dtype == "float32" else 1e-13)


def test_what_is_rounded_behind_a_nest_is_a_part_of_it_and_right() -> None:
    nodes = [node("ConvTranspose", "x w", "c", group=2), node("QuantizeLinear", "c scale zero", "q"),
             node("DequantizeLinear", "q scale zero", "y")]
    constants = [numpy_helper.from_array(array, name) for name, array in (
        ("w", floats(4, 3, 3, 3, seed=1)), ("scale", np.float32(0.3)), ("zero", np.uint8(100)))]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4, 5, 6])
    graph = helper.make_graph(nodes, "rounded", [x], [helper.make_empty_tensor_value_info("y")], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert_kernels_and_right(model, {"x": floats(1, 4, 5, 6)})
