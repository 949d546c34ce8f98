"""Lowered nodes compute the references' results, in float and quantised."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX512_VNNI, PORTABLE
from infer_server.engines.ir.graph import BATCH, Graph, Node, QParams, TensorType, type_of
from infer_server.engines.lowering.calls.calls import FallbackCall, ProblemCall, Refused
from infer_server.engines.lowering.calls.placement import buffer_bytes, strided
from infer_server.engines.lowering.lower import lower
from infer_server.engines.lowering.problems.matmul import IntegerProduct
from infer_server.engines.lowering.problems.nest import Nest
from infer_server.engines.lowering.problems.view import dense_view
from infer_server.engines.lowering.rules.copies import refined
from infer_server.engines.ops import OPS, Stored
from scripts.testing.suite import Runner, guarded
from tests.engines.backends.llvm.runner import CpuRunner
from tests.engines.backends.runners import CPU, OTHERS

ITEMS = 3
U8 = QParams((0.05,), (120,), "uint8")
OUT = QParams((0.04,), (110,), "uint8")
IMAGE = (6, 8, 12)
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any]]] = {   # op, item shape, attrs, constants
    "max pool": ("MaxPool", IMAGE, {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}, {}),
    "max pool, ceil": ("MaxPool", IMAGE, {"kernel_shape": (3, 3), "strides": (2, 2), "ceil_mode": 1}, {}),
    "average pool": ("AveragePool", IMAGE, {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}, {}),
    "average pool, padding counts": ("AveragePool", IMAGE, {"kernel_shape": (3, 2), "strides": (2, 1),
                                                            "pads": (1, 0, 1, 1), "count_include_pad": 1}, {}),
    "global average": ("GlobalAveragePool", IMAGE, {}, {}),
    "global max": ("GlobalMaxPool", IMAGE, {}, {}),
    "mean of rows and columns": ("ReduceMean", IMAGE, {"axes": (1, 2), "keepdims": 0}, {}),
    "mean of channels": ("ReduceMean", IMAGE, {"axes": (3,)}, {}),
    "sum without the axis": ("ReduceSum", (5, 7), {"axes": (2,), "keepdims": 0}, {}),
    "mean of rows": ("ReduceMean", IMAGE, {"axes": (1,), "keepdims": 0}, {}),
    "sum of columns": ("ReduceSum", IMAGE, {"axes": (2,)}, {}),
    "max of neighbouring axes": ("ReduceMax", (2, 3, 4, 5, 12), {"axes": (2, 3)}, {}),
    "max of channels": ("ReduceMax", IMAGE, {"axes": (3,), "keepdims": 0}, {}),
    "min of a row": ("ReduceMin", (9,), {"axes": (1,)}, {}),
    "softmax": ("Softmax", (5, 33), {"axis": -1}, {}),
    "log softmax": ("LogSoftmax", (10,), {"axis": 1}, {}),
    "layer norm": ("LayerNormalization", (5, 24), {"axis": -1}, {"scale": (24,), "bias": (24,)}),
    "l2 norm": ("LpNormalization", (5, 24), {"axis": -1}, {}),
    "lrn": ("LRN", IMAGE, {"size": 5, "alpha": 0.5}, {}),
    "nearest": ("Resize", IMAGE, {"scales": (1.0, 1.0, 2.0, 2.0), "coordinate_transformation_mode": "asymmetric",
                                  "nearest_mode": "floor"}, {}),
    "linear": ("Resize", IMAGE, {"sizes": (BATCH, 12, 9, 16), "mode": "linear"}, {}),
    "cubic": ("Resize", IMAGE, {"sizes": (BATCH, 12, 9, 16), "mode": "cubic"}, {}),
    "depth to space": ("DepthToSpace", IMAGE, {"blocksize": 2}, {}),
    "depth to space, columns first": ("DepthToSpace", IMAGE, {"blocksize": 2, "mode": "CRD"}, {}),
    "slice with a step": ("Slice", (9, 12), {"axes": (2,), "starts": (1,), "ends": (11,), "steps": (3,)}, {}),
    "expand": ("Expand", (1, 1, 12), {"shape": (1, 4, 5, 12)}, {}),
    "pad": ("Pad", IMAGE, {"pads": (0, 1, 2, 0, 0, 0, 1, 3), "value": 0.7}, {}),
    "pad that cuts": ("Pad", (9, 7), {"pads": (0, -2, 1, 0, 1, -3)}, {}),
    "transposed": ("ConvTranspose", IMAGE, {"kernel_shape": (2, 2), "strides": (2, 2)}, {"w": (12, 5, 2, 2)}),
    "transposed, one channel": ("ConvTranspose", IMAGE, {"kernel_shape": (2, 2), "strides": (2, 2)},
                                {"w": (12, 1, 2, 2), "b": (1,)}),
    "transposed, few channels": ("ConvTranspose", IMAGE, {"kernel_shape": (4, 4), "strides": (2, 2),
                                                          "pads": (1, 1, 1, 1)}, {"w": (12, 3, 4, 4), "b": (3,)}),
    "transposed, overlapping": ("ConvTranspose", IMAGE, {
        "kernel_shape": (3, 4), "strides": (2, 3), "pads": (1, 0, 1, 2), "output_padding": (1, 0)},
        {"w": (12, 5, 3, 4), "b": (5,)}),
    "transposed, stride 1": ("ConvTranspose", IMAGE, {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)},
                             {"w": (12, 5, 3, 3)}),
    "transposed, groups": ("ConvTranspose", IMAGE, {"kernel_shape": (3, 3), "strides": (2, 1), "pads": (1, 1, 0, 1),
                                                    "group": 2}, {"w": (12, 17, 3, 3), "b": (34,)}),
    "transposed, groups that are merged": ("ConvTranspose", IMAGE, {
        "kernel_shape": (2, 3), "strides": (2, 2), "group": 4}, {"w": (12, 5, 2, 3)}),
    "transposed, a channel to itself": ("ConvTranspose", IMAGE, {
        "kernel_shape": (4, 3), "strides": (2, 2), "pads": (1, 0, 1, 1), "group": 12}, {"w": (12, 1, 4, 3)}),
    "space to depth": ("SpaceToDepth", IMAGE, {"blocksize": 2}, {}),
}
ANY_RANK = ("Reduce", "Slice", "Expand", "Pad", "Softmax", "LogSoftmax", "LayerNormalization", "LpNormalization")


def graph_of(case: Any, quantised: bool) -> Graph:
    op, shape, attrs, constants = case
    random = np.random.default_rng(0)
    if not op.startswith(ANY_RANK):
        attrs = {**attrs, "channels_last": 1}
    arrays = {name: random.standard_normal(extents).astype(np.float32) for name, extents in constants.items()}
    integers = quantised and "w" in arrays
    node = Node(op, ("x", *arrays), ("y",), attrs, name=op, precision="int8" if integers else "fp32")
    x = TensorType(np.dtype(np.float32), (BATCH, *shape), U8 if quantised else None)
    types = {name: TensorType(array.dtype, array.shape) for name, array in arrays.items()}
    y = OPS[op].infer(node, (TensorType(x.dtype, x.shape), *types.values()))[0]
    if integers:
        arrays["w"] = random.integers(-128, 128, arrays["w"].shape).astype(np.int8)
        couts = arrays["w"].shape[1]
        types["w"] = type_of(arrays["w"], QParams(tuple(np.linspace(0.001, 0.003, couts)), (0,) * couts, "int8", 1))
    out = U8 if OPS[op].stored is Stored.ALIKE and op != "Pad" else OUT       # by zeros a Pad would be
    return Graph("g", ("x",), ("y",), (node,), arrays,
                 {"x": x, "y": TensorType(y.dtype, y.shape, out if quantised else None), **types})


def execute(graph: Graph, runner: Runner, x: Any) -> Any:
    """Run the lowered graph and return its one output as it is stored."""
    lowered = lower(graph, runner.lanes)
    memory = [guarded(buffer_bytes(storage, ITEMS)) for storage in lowered.placements.buffers]
    for buffer, storage in zip(memory, lowered.placements.buffers, strict=True):        # the halos
        strided(buffer, 0, storage.whole, ITEMS)[...] = storage.pad

    def array(name: str) -> Any:
        placement = lowered.placements[name]
        return strided(memory[placement.buffer], placement.offset, placement.view, ITEMS)

    array("x")[...] = x
    for call in lowered.calls:
        assert isinstance(call, ProblemCall), call.reason
        inputs, outputs = ([memory[p.buffer][p.offset:] for p in of] for of in (call.inputs, call.outputs))
        runner.execute(call.problem, inputs, outputs, dict(call.constants), ITEMS)
    return array("y").copy()


def reference(graph: Graph, x: Any) -> Any:
    node, = graph.nodes
    constants = [graph.constants[name] for name in node.inputs[1:]]
    quant = graph.types[node.inputs[1]].quant if constants else None
    if quant:       # of the weights, by output channel
        constants[0] = constants[0] * np.array(quant.scale, np.float32).reshape(1, -1, 1, 1)
    return OPS[node.op].reference(node, x, *constants)[0]


@pytest.mark.parametrize("runner", [CpuRunner(AVX512_VNNI), CPU, *OTHERS], ids=lambda runner: runner.name)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_float_node_is_compiled(case: Any, runner: Runner) -> None:
    graph = graph_of(case, quantised=False)
    x = np.random.default_rng(1).standard_normal((ITEMS, *case[1])).astype(np.float32)
    np.testing.assert_allclose(execute(graph, runner, x), reference(graph, x), 1e-5, 1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_quantised_node_is_compiled(case: Any) -> None:
    """Results are within half a step of the real ones, plus float32 rounding."""
    graph = graph_of(case, quantised=True)
    x = np.random.default_rng(1).integers(0, 256, (ITEMS, *case[1])).astype(np.uint8)
    quant = graph.types["y"].quant
    assert quant is not None
    expected = reference(graph, (np.float32(U8.scale[0]) * (x.astype(np.float32) - U8.zero_point[0])))
    expected = np.clip(expected / quant.scale[0] + quant.zero_point[0], 0, 255)
    got = execute(graph, CPU, x)
    assert got.dtype == np.uint8 and np.abs(got - expected).max() < 0.501
    assert got.std() > 1 or case[0] in ("LpNormalization", "Softmax")


@pytest.mark.parametrize("case, calls", [("transposed", 2), ("transposed, one channel", 2),
                                         ("transposed, few channels", 2), ("transposed, overlapping", 6)])
def test_the_phases_of_columns_are_one_kernel_unless_zeros_cost_more(case: str, calls: int) -> None:
    """The three phases overlap and read one or two pixels, and differ in their border."""
    assert len(lower(graph_of(CASES[case], quantised=False), AVX512_VNNI.lanes).calls) == calls


def gather(data: Any, index: Any, axis: int) -> Graph:
    """Return a Gather with either a constant matrix or a constant index."""
    constants = {name: array for name, array in (("data", data), ("index", index)) if isinstance(array, np.ndarray)}
    name = "index" if isinstance(data, np.ndarray) else "data"
    kind = index if isinstance(data, np.ndarray) else data
    inputs = ("x", "index") if name == "data" else ("data", "x")
    node = Node("Gather", inputs, ("y",), {"axis": axis})
    types = {key: TensorType(array.dtype, array.shape) for key, array in constants.items()} | {"x": kind}
    y = OPS["Gather"].infer(node, tuple(types[key] for key in node.inputs))[0]
    return Graph("g", ("x",), ("y",), (node,), constants, {**types, "y": y})


def test_an_embedding_is_looked_up() -> None:
    table = np.random.default_rng(0).standard_normal((50, 9)).astype(np.float32)
    x = np.random.default_rng(1).integers(0, 50, (ITEMS, 7))
    graph = gather(table, TensorType(np.dtype(np.int64), (BATCH, 7)), 0)
    np.testing.assert_array_equal(execute(graph, CPU, x), table[x])


@pytest.mark.parametrize("index, axis", [([3, 0, -1], 1), (2, 1), ([1, 0], 2), (0, 2)])
def test_a_constant_index_picks(index: Any, axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((ITEMS, 4, 5)).astype(np.float32)
    graph = gather(TensorType(np.dtype(np.float32), (BATCH, 4, 5)), np.array(index), axis)
    np.testing.assert_array_equal(execute(graph, CPU, x), np.take(x, index, axis))


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_a_shuffle_of_channels_is_a_permutation_of_axes(groups: int) -> None:
    index = np.arange(24).reshape(groups, -1).T.ravel()
    graph = gather(TensorType(np.dtype(np.float32), (BATCH, 3, 24)), index, 2)
    assert [call.problem.family for call in lower(graph, PORTABLE.lanes).compiled] == ["permute"]
    x = np.random.default_rng(0).standard_normal((ITEMS, 3, 24)).astype(np.float32)
    np.testing.assert_array_equal(execute(graph, CPU, x), x[:, :, index])


def test_a_depthwise_convolution_has_a_kernel_of_its_own() -> None:
    weights = np.random.default_rng(0).standard_normal((12, 1, 3, 3)).astype(np.float32)
    attrs = {"group": 12, "kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "channels_last": 1}
    node = Node("Conv", ("x", "w"), ("y",), attrs)
    x = TensorType(np.dtype(np.float32), (BATCH, *IMAGE))
    types = {"x": x, "y": x, "w": TensorType(x.dtype, weights.shape)}
    graph = Graph("g", ("x",), ("y",), (node,), {"w": weights}, types)
    assert [call.problem.family for call in lower(graph, PORTABLE.lanes).compiled] == ["depthwise"]
    data = np.random.default_rng(1).standard_normal((ITEMS, *IMAGE)).astype(np.float32)
    np.testing.assert_allclose(execute(graph, CPU, data), reference(graph, data), 1e-5, 1e-5)


def test_what_a_target_has_no_kernel_for_is_a_nest() -> None:
    types = {"a": TensorType(np.dtype(np.uint8), (5, 8)), "b": TensorType(np.dtype(np.uint8), (8, 7)),
             "y": TensorType(np.dtype(np.int32), (5, 7))}
    graph = Graph("g", ("a", "b"), ("y",), (Node("MatMulInteger", ("a", "b"), ("y",)),), {}, types)
    for solved, family in ((None, "integer_product"), ((Nest, IntegerProduct), "integer_product"), ((Nest,), "nest")):
        assert [call.problem.family for call in lower(graph, PORTABLE.lanes, solved).compiled] == [family]


def test_what_no_kernel_computes_says_why() -> None:
    graph = graph_of(("Softmax", (5, 33), {"axis": 0}, {}), quantised=False)
    call, = lower(graph, PORTABLE.lanes).calls
    assert isinstance(call, FallbackCall) and "the batch axis" in call.reason


def test_a_reshape_between_tensors_with_gaps_is_seen_in_their_common_parts() -> None:
    """A grey image without halo becomes NHWC with one, and is quantised on the way."""
    weights = np.ones((4, 1, 3, 3), np.float32)
    view = Node("Reshape", ("x",), ("image",), {"shape": (BATCH, 5, 7, 1)})
    conv = Node("Conv", ("image", "w"), ("y",), {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "channels_last": 1})
    kind = np.dtype(np.float32)
    types = {"x": TensorType(kind, (BATCH, 1, 5, 7)), "image": TensorType(kind, (BATCH, 5, 7, 1)),
             "y": TensorType(kind, (BATCH, 5, 7, 4)), "w": TensorType(kind, weights.shape)}
    graph = Graph("g", ("x",), ("y",), (view, conv), {"w": weights}, types)
    x = np.random.default_rng(0).standard_normal((ITEMS, 1, 5, 7)).astype(np.float32)
    padded = np.pad(x[:, 0], [(0, 0), (1, 1), (1, 1)])
    expected: Any = sum(padded[:, i:i + 5, j:j + 7] for i in range(3) for j in range(3))
    np.testing.assert_allclose(execute(graph, CPU, x), np.repeat(expected[..., None], 4, 3), 1e-5, 1e-5)


def padded_pool(pads: tuple[int, ...], value: float) -> Graph:
    """Return a Pad and MaxPool that cannot be merged, because the padded values have either sign."""
    sign = Node("Neg", ("x",), ("signed",))
    pad = Node("Pad", ("signed",), ("padded",), {"pads": pads, "value": value})
    pool = Node("MaxPool", ("padded",), ("y",), {"kernel_shape": (3, 3), "strides": (2, 2), "channels_last": 1})
    types = {"x": TensorType(np.dtype(np.float32), (BATCH, *IMAGE))}
    for node in (sign, pad, pool):
        types[node.outputs[0]] = OPS[node.op].infer(node, (types[node.inputs[0]],))[0]
    return Graph("g", ("x",), ("y",), (sign, pad, pool), {}, types)


@pytest.mark.parametrize("pads, value, families", [
    ((0, 1, 2, 0, 0, 1, 0, 0), 0.0, ["pointwise", "pool"]),
    ((0, 1, 2, 0, 0, 1, 0, 0), -1.0, ["pointwise", "permute", *["pointwise"] * 3, "pool"]),
    ((0, 1, 1, 1, 0, 0, 0, 0), 0.0, ["pointwise", "permute", *["pointwise"] * 3, "pool"]),
], ids=["zeros are a halo", "other numbers are not", "nor are more channels"])
def test_a_pad_before_a_pool(pads: Any, value: float, families: list[str]) -> None:
    graph = padded_pool(pads, value)
    assert [call.problem.family for call in lower(graph, PORTABLE.lanes).compiled] == families
    x = np.random.default_rng(0).standard_normal((ITEMS, *IMAGE)).astype(np.float32)
    widths = [(before, after) for before, after in zip(pads[:4], pads[4:], strict=True)]
    padded = np.pad(-x, widths, constant_values=value)
    height, width = ((extent - 3) // 2 + 1 for extent in padded.shape[1:3])
    expected = np.max([padded[:, i:i + 2 * height - 1:2, j:j + 2 * width - 1:2] for i in range(3) for j in range(3)], 0)
    np.testing.assert_array_equal(execute(graph, CPU, x), expected)


def test_common_parts() -> None:
    x, y = refined(dense_view("uint8", (6, 1, 4)), dense_view("uint8", (2, 12)))
    assert x.shape == y.shape == (2, 3, 4) and x.strides == y.strides == (12, 4, 1)
    with pytest.raises(Refused, match="common factors"):
        refined(dense_view("uint8", (4, 3)), dense_view("uint8", (6, 2)))
