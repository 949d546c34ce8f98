"""Passes take a number of steps that is linear in the nodes, however many paths lead through them.

n times x * sigmoid(x) have 2**n paths, and a chain may be longer than Python's recursion limit. The centres below have
the operators of every rule's pattern; in front of them stand LEVELS levels of a diamond.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import infer_server.engines.passes.pipeline as pipeline
from infer_server.calibration.data.generated import index_bound
from infer_server.engines.frontend.onnx_file import in_order
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir.graph import Graph
from infer_server.engines.lowering.lower import Lowered, lower
from infer_server.engines.passes.pipeline import optimise, simplify
from infer_server.engines.passes.quantization.quantize import edges_to_calibrate, quantize
from infer_server.engines.passes.rewriting.dataflow import Walk, dataflow
from infer_server.engines.passes.rewriting.rewrite import Rule

LEVELS = int(os.environ.get("INFER_TEST_LEVELS", 70))      # of diamonds
CHAIN = 200             # levels of a chain
STEPS = 3600            # calls of functions for each node of a model; 800 to 2,850 are usual, at any LEVELS
FLOAT = onnx.TensorProto.FLOAT


class Writer:
    """Builder of an ONNX graph."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[bytes, onnx.TensorProto] = {}

    def __call__(self, op: str, *inputs: str, count: int = 1, **attrs: Any) -> Any:
        names = [f"{op.lower()}{len(self.nodes)}.{i}" for i in range(count)]
        self.nodes.append(helper.make_node(op, inputs, names, names[0], **attrs))
        return names[0] if count == 1 else names

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        tensor = numpy_helper.from_array(np.asarray(values, dtype), f"c{len(self.constants)}")
        key = str(tensor.data_type).encode() + str(tensor.dims).encode() + tensor.raw_data
        return str(self.constants.setdefault(key, tensor).name)

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def draw(self, *shape: int) -> str:
        return self.constant(np.random.default_rng(0).standard_normal(shape) / 3)

    def model(self, ends: list[str], inputs: dict[str, tuple[int, list[Any]]]) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, "g", [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
            [helper.make_empty_tensor_value_info(name) for name in ends], list(self.constants.values()))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ---- diamonds of x [n, 8, 4, 4], or of integers [n, 8]
def _halves(w: Writer, x: str) -> Any:
    first, second = w("Split", x, w.ints(4, 4), count=2, axis=1)
    return w("Concat", second, first, axis=1)


def _slices(w: Writer, x: str) -> Any:
    parts = [w("Slice", x, w.ints(start), w.ints(start + 4), w.ints(1)) for start in (4, 0)]
    return w("Concat", *parts, axis=1)


def _turned(w: Writer, x: str) -> Any:
    seen = w("Reshape", x, w.ints(0, 4, 2, 4, 4))
    parts = [w("Slice", seen, w.ints(start), w.ints(start + 1), w.ints(2)) for start in (0, 1)]
    return w("Reshape", w("Concat", *parts, axis=2), w.ints(0, 8, 4, 4))


DIAMONDS: dict[str, Callable[[Writer, str], Any]] = {
    "x * sigmoid(x)": lambda w, x: w("Mul", x, w("Sigmoid", x)),
    "x + relu(x)": lambda w, x: w("Add", x, w("Relu", x)),
    "x + x": lambda w, x: w("Add", x, x),
    "x / 2 + x": lambda w, x: w("Add", w("Mul", x, w.constant(0.5)), x),
    "x * tanh(x)": lambda w, x: w("Mul", w("Tanh", x), x),
    "max(x, -x)": lambda w, x: w("Max", x, w("Neg", x)),
    "where(x > 0, x, relu(x))": lambda w, x: w("Where", w("Greater", x, w.constant(0.0)), x, w("Relu", x)),
    "halves": _halves,
    "slices": _slices,
    "views": _turned,
    "x + conv(x)": lambda w, x: w("Add", x, w("Relu", w("Conv", x, w.draw(8, 8, 1, 1)))),
    "pools": lambda w, x: w("Add", w("MaxPool", x, kernel_shape=[1, 1]), w("AveragePool", x, kernel_shape=[1, 1])),
}
DIAMONDS_OF_INTEGERS: dict[str, Callable[[Writer, str], Any]] = {
    "i + i * 2": lambda w, x: w("Add", x, w("Mul", x, w.ints(2))),
    "halves": _halves,
    "min(i, i + 1)": lambda w, x: w("Min", x, w("Add", x, w.ints(1))),
    "views": lambda w, x: w("Add", w("Reshape", x, w.ints(0, 8)), w("Expand", x, w.ints(1, 8))),
}


# ---- what stands behind the diamonds: patterns, each with the end of the diamonds in its operands
def _centres(w: Writer, x: str) -> Iterator[str]:
    padded = w("Pad", x, w.ints(0, 0, 1, 1, 0, 0, 1, 1))
    flat, rows = w("Flatten", x), w("Reshape", x, w.ints(0, 8, 16))
    yield w("Conv", padded, w.draw(8, 8, 3, 3))
    yield w("MaxPool", padded, kernel_shape=[3, 3])
    yield w("AveragePool", padded, kernel_shape=[3, 3])
    yield w("BatchNormalization", x, *(w.constant(np.full(8, n)) for n in (1.5, 0.5, 0.25, 2.0)))
    yield w("InstanceNormalization", x, w.constant(np.ones(8)), w.constant(np.zeros(8)))
    for op in ("GlobalAveragePool", "GlobalMaxPool", "Relu", "Softmax", "LogSoftmax", "LpNormalization"):
        yield w(op, x)
    for op in ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceSumSquare"):
        yield w(op, x, axes=[1])
    yield w("ReduceSum", x, w.ints(1))
    yield w("Clip", x, w.constant(0.0), w.constant(6.0))
    yield w("Resize", x, "", w.constant([1, 1, 2, 2]))
    yield w("Squeeze", w("Unsqueeze", x, w.ints(1)), w.ints(1))
    yield w("Transpose", w("Tile", x, w.ints(1, 2, 1, 1)), perm=[0, 2, 3, 1])
    for op in ("Add", "Sub", "Mul", "Div", "Max", "Min"):
        yield w(op, x, w("Expand", x, w.ints(1, 8, 4, 4)))
    yield w("Pow", x, w.constant(2.0))
    yield w("Where", w("And", *(w(op, x, w.constant(0.5)) for op in ("Greater", "Less"))), x, w.constant(0.0))
    yield w("Where", w("Or", *(w(op, x, w.constant(0.5)) for op in ("Greater", "Less"))), x, w.constant(0.0))
    yield w("MatMul", x, w.draw(4, 4))
    yield w("Gemm", flat, w.draw(128, 8))
    scores = w("Mul", w("MatMul", rows, w("Transpose", rows, perm=[0, 2, 1])), w.constant(0.25))
    bias = w("Slice", rows, w.ints(0), w.ints(8), w.ints(2))
    yield w("MatMul", w("Softmax", w("Add", scores, bias)), rows)
    scale, zero = w.constant(0.1), w.constant(7, np.uint8)
    yield w("MaxPool", w("DequantizeLinear", w("QuantizeLinear", x, scale, zero), scale, zero), kernel_shape=[2, 2])
    stored, step, point = w("DynamicQuantizeLinear", flat, count=3)
    product = w("MatMulInteger", stored, w.constant(np.ones((128, 3)), np.int8), point)
    yield w("Mul", w("Cast", product, to=FLOAT), step)
    yield w("ScatterND", flat, w.constant([[[0, 1], [0, 2]]], np.int64), w.constant(np.zeros((1, 2))))
    yield w("Gather", x, w.ints(3), axis=1)
    state = w("Transpose", w("ReduceMean", rows, axes=[2]), perm=[2, 0, 1])
    sequence = w("Transpose", rows, perm=[1, 0, 2])
    yield w("LSTM", sequence, w.draw(1, 32, 16), w.draw(1, 32, 8), "", "", state, hidden_size=8)
    yield w("Add", state, w("ConstantOfShape", w("Shape", state)))


def _items(w: Writer) -> Any:
    """Add the index of each item, [n]."""
    count = w("Gather", w("Shape", "x"), w.constant(0, np.int64))
    return w("Range", w.constant(0, np.int64), count, w.constant(1, np.int64))


def _indices(w: Writer) -> Any:
    """Add n + 0 ... n + 7 for item n, [n, 8]."""
    return w("Add", w("Unsqueeze", _items(w), w.ints(1)), w.ints(*range(8)))


def _centres_of_integers(w: Writer, i: str) -> Iterator[str]:
    table, x = w.draw(50, 6), "x"
    yield w("Gather", table, i)
    yield w("GatherElements", w("Reshape", x, w.ints(0, -1)), i, axis=1)
    yield w("GatherElements", w("Reshape", x, w.ints(0, -1)), w("Expand", i, w.ints(1, 8)), axis=1)
    items = _items(w)
    starts = w("Mul", w("Unsqueeze", items, w.ints(1)), w.ints(8))
    flat = w("Reshape", x, w.ints(-1, 16))
    yield w("Gather", flat, w("Add", i, starts))
    pairs = w("Concat", *(w("Unsqueeze", part, w.ints(2)) for part in (w("Expand", w("Unsqueeze", items, w.ints(1)),
                                                                        w("Shape", i)), i)), axis=2)
    yield w("GatherND", w("Reshape", x, w.ints(0, 8, 16)), pairs)


def _steps_of(limit: int, run: Callable[[], Any]) -> Any:
    """Call a function and return its result; fails as soon as it has made more than `limit` calls."""
    count = 0

    def called(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")
        if count > limit:
            sys.setprofile(None)
            pytest.fail(f"more than {limit} calls, the last in {frame.f_code.co_qualname}")

    sys.setprofile(called)
    try:
        return run()
    finally:
        sys.setprofile(None)


def _lowered(model: onnx.ModelProto) -> Lowered:
    """Run the model through every stage that walks over graphs."""
    graph = optimise(simplify(graph_from_onnx(model)))
    for name in graph.inputs:
        index_bound(graph, name)
    return lower(quantize(graph, dict.fromkeys(edges_to_calibrate(graph), (-1.0, 1.0))), lanes=16)


def _model(diamond: Callable[[Writer, str], Any], integers: bool = False, levels: int = LEVELS) -> onnx.ModelProto:
    w = Writer()
    end = _indices(w) if integers else "x"
    for _ in range(levels):
        end = diamond(w, end)
    ends = list((_centres_of_integers if integers else _centres)(w, end))
    return w.model(ends, {"x": (FLOAT, ["n", 8, 4, 4])})


@pytest.mark.parametrize("kind", DIAMONDS)
def test_diamonds_before_every_pattern_cost_no_more_than_their_nodes(kind: str) -> None:
    model = _model(DIAMONDS[kind])
    lowered = _steps_of(STEPS * len(model.graph.node), lambda: _lowered(model))
    assert lowered.calls


@pytest.mark.parametrize("kind", DIAMONDS_OF_INTEGERS)
def test_diamonds_of_indices_before_lookups_cost_no_more_than_their_nodes(kind: str) -> None:
    model = _model(DIAMONDS_OF_INTEGERS[kind], integers=True)
    lowered = _steps_of(STEPS * len(model.graph.node), lambda: _lowered(model))
    assert lowered.calls


def test_the_centres_have_the_operators_of_every_rule() -> None:
    groups = [value for value in vars(pipeline).values() if isinstance(value, tuple)]
    rules = [rule for group in groups for rule in group if isinstance(rule, Rule)]
    made = {node.op_type for centres, name in ((_centres, "x"), (_centres_of_integers, "x"))
            for w in [Writer()] if list(centres(w, name)) for node in w.nodes}
    made |= {"FakeQuantize"}            # what a QuantizeLinear and a DequantizeLinear become
    assert rules and not [type(rule).__name__ for rule in rules if made.isdisjoint(rule.pattern.ops)]


@contextmanager
def _shallow_stack() -> Iterator[None]:
    """Set a recursion limit far below the length of the chains."""
    before = sys.getrecursionlimit()
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(depth + 120)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


CHAINS: dict[str, Callable[[Writer, str], Any]] = {
    "tanh": lambda w, x: w("Tanh", x),
    "x * y": lambda w, x: w("Mul", x, "x"),
    "x + y": lambda w, x: w("Add", x, "x"),
    "conv": lambda w, x: w("Conv", x, w.draw(8, 8, 1, 1)),
    "views": lambda w, x: w("Reshape", w("Tanh", w("Reshape", x, w.ints(0, 8, 16))), w.ints(0, 8, 4, 4)),
    "halves": _halves,
}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_may_be_longer_than_the_recursion_limit(kind: str) -> None:
    model = _model(CHAINS[kind], levels=CHAIN)
    with _shallow_stack():
        assert _lowered(model).calls


def test_an_unsorted_file_is_sorted_in_steps_linear_in_its_nodes() -> None:
    w, x = Writer(), "x"
    for _ in range(3000):
        x = w("Tanh", x)
    nodes = w.nodes[::-1]
    order = _steps_of(60 * len(nodes), lambda: in_order(nodes))
    assert [node.name for node in order] == [node.name for node in w.nodes]


def test_a_dataflow_question_is_asked_once_for_each_tensor() -> None:
    asked: list[str] = []

    @dataflow
    def depth(graph: Graph, name: str) -> Walk[int]:
        asked.append(name)
        node = graph.producer.get(name)
        deepest = 0
        for source in node.inputs if node else ():
            deepest = max(deepest, 1 + (yield source))
        return deepest

    w, x = Writer(), "x"
    for _ in range(3000):
        x = w("Add", x, x)
    graph = graph_from_onnx(w.model([x], {"x": (FLOAT, ["n", 8])}))
    assert depth(graph, x) == depth(graph, x) == 3000
    assert len(asked) == len(set(asked)) == 3001
