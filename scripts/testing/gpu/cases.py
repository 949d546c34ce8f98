"""A few problems of every kernel family for GPUs, with inputs for some items.

tests/gpu/test_kernels.py runs each once on the emulated GPU, scripts/gpu_families.py by every tactic on every
architecture, benchmarks/gpu.py by every tactic on a real one.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from infer_server.engines.backends.cuda.kernels.matmul.partial_attention import (
    AttentionPeaks,
    AttentionSums,
    JoinedAttention,
)
from infer_server.engines.backends.cuda.kernels.partial import constants_of_parts, in_parts
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from infer_server.engines.lowering.nest.program import Writer
from infer_server.engines.lowering.problems.convolution import Contraction, Depthwise
from infer_server.engines.lowering.problems.elementwise import CumulativeSum, Integers, Pointwise, TopK
from infer_server.engines.lowering.problems.images import GlobalPool, Pool, Resize
from infer_server.engines.lowering.problems.matmul import Attention, Product
from infer_server.engines.lowering.problems.movement import GatherElements, Lookup, Permute, Take
from infer_server.engines.lowering.problems.nest import Nest, Scatter
from infer_server.engines.lowering.problems.problem import STORED, Array, Problem
from infer_server.engines.lowering.problems.rows import Extreme, Lrn, Norm, Reduce, RowProblem, Softmax
from infer_server.engines.lowering.problems.view import View, dense_view
from scripts.testing.recurrence import Case as Layer
from scripts.testing.recurrence import node_of
from scripts.testing.suite import gapped, random_array, requantise

Case = tuple[Any, list[Array], dict[str, Any]]      # a problem, its inputs for some items, its constants
TOLERANCE = {"int8": 0, "int16": 0, "fp32": 1e-4, "bf16": 4e-2, "fp16": 8e-3}    # tolerance for sums in another order

RECURRENT_STEPS = 3     # both places of the states are written, and one of them again


def inputs_of(problem: Problem, seed: int = 0) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random_array(random, view.dtype, (2, *view.shape)) for view in problem.inputs]


def convolution(precision: str = "int8", cin: int = 48, cout: int = 72, groups: int = 1, gap: int = 16,
                taps: int = 3, stride: int = 1, stored: str = "") -> Case:
    random, dtype = np.random.default_rng(0), STORED[precision]
    program, constants = requantise(cout, random, (0.005 if precision == "int8" else 10) / (cin * taps) ** 0.5,
                                    residual=True)
    reach = 3 * stride + taps
    y = gapped(stored or dtype, (4, 4, cout), 1)
    problem = Contraction(gapped(dtype, (reach, reach, cin), gap), y, (y,), program, precision, (taps, taps),
                          (stride, stride), groups=groups)
    shape = (cout, cin // groups, taps, taps)
    weights = random_array(random, "int8" if precision == "int8" else "float32", shape)
    return problem, inputs_of(problem), {"weights": weights if precision != "bf16" else weights / 4, **constants}


def partial_sums(precision: str) -> Case:
    whole, (x, _), constants = convolution(precision, cin=128)
    problem, _ = in_parts(whole, 2)
    return problem, [x], constants_of_parts(problem, constants)


def sum_of_parts(precision: str) -> Case:
    whole, _, constants = convolution(precision, cin=128)
    _, problem = in_parts(whole, 2)
    return problem, inputs_of(problem), constants


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "3 channels": dict(cin=3, cout=17, gap=0, taps=5, stride=2),
    "groups": dict(cin=24, cout=36, groups=4),
    "a product of matrices, odd": dict(cin=100, cout=70, taps=1, gap=0),
    "to floats": dict(stored="float32"),
}


def pointwise(precision: str) -> Case:
    program, constants = requantise(24, np.random.default_rng(0), residual=True, accumulator=False)
    view = gapped(STORED[precision], (3, 5, 24))
    problem = Pointwise((view, gapped("int64", (3, 5, 24))), view, program)
    return problem, inputs_of(problem), constants


def functions(_: str) -> Case:
    """Return a Pointwise of exponentials and similar functions, with the same bits as on CPUs."""
    b = ProgramBuilder(False)
    value = b.operand()
    for name in ("gelu", "tanh", "sigmoid", "log", "sin", "float16", "bfloat16", "exp", "erf"):
        value = b.add(name, value)
    view = dense_view("float32", (3, 7, 5))
    problem = Pointwise((view,), view, b.program(), uniform=True)
    return problem, inputs_of(problem), {"program": b.constants}


def permute(precision: str) -> Case:
    y = dense_view(STORED[precision], (5, 6, 3))
    problem = Permute(View(y.dtype, y.shape, (6 * y.size, y.size, 30 * y.size), 90 * y.size), y)
    return problem, inputs_of(problem), {}


def integers(_: str) -> Case:
    view = dense_view("int32", (4, 9))
    problem = Integers((view, dense_view("int64", (4, 9))), dense_view("int64", (4, 9)), "modulo")
    return problem, inputs_of(problem), {}


def average(precision: str) -> Case:
    program, constants = requantise(12, np.random.default_rng(0), residual=True)
    x, y = (gapped(STORED[precision], shape) for shape in ((7, 9, 12), (4, 5, 12)))
    problem = Pool(x, y, (y,), program, "average", (3, 3), (2, 2), (1, 1, 1, 1), count_include_pad=True, pad_value=7)
    return problem, inputs_of(problem), constants


def maximum(precision: str) -> Case:
    view = gapped(STORED[precision], (7, 9, 5))
    problem = Pool(view, view, (), ProgramBuilder(True).program(), "max", (3, 3), (1, 1), (2, 2, 2, 2), (2, 2))
    return problem, inputs_of(problem), {"program": []}


def global_sum(precision: str) -> Case:
    program, constants = requantise(24, np.random.default_rng(0), 1 / 35, residual=True)
    y = dense_view(STORED[precision], (1, 1, 24))
    problem = GlobalPool(gapped("float32", (5, 7, 24)), y, (y,), program, "sum")
    return problem, inputs_of(problem), constants


def depthwise(precision: str) -> Case:
    random, dtype = np.random.default_rng(0), STORED[precision]
    program, constants = requantise(24, random, 0.02 if precision == "int8" else 3.0, residual=True)
    y = gapped(dtype, (5, 6, 24))
    problem = Depthwise(gapped(dtype, (11, 8, 24)), y, (y,), program, precision, (3, 3), (2, 1))
    weights = random_array(random, "int8" if precision == "int8" else "float32", (24, 1, 3, 3))
    return problem, inputs_of(problem), {"weights": weights, **constants}


def resize(precision: str) -> Case:
    program, constants = requantise(8, np.random.default_rng(0), residual=True)
    y, random = dense_view(STORED[precision], (6, 8, 8)), np.random.default_rng(0)
    problem = Resize(dense_view(y.dtype, (3, 4, 8)), y, (y,), program, (2, 2))
    tables = {name: (random.integers(0, extent, (outputs, 2)), random.random((outputs, 2)).astype(np.float32))
              for name, outputs, extent in (("rows", 6, 3), ("columns", 8, 4))}
    return problem, inputs_of(problem), {**tables, **constants}


def take(axis: int, precision: str) -> Case:
    shape, dtype = [4, 5, 16], STORED[precision]
    shape[axis] = 7
    problem = Take(dense_view(dtype, (4, 5, 16)), dense_view(dtype, tuple(shape)), axis)
    return problem, inputs_of(problem), {"index": np.random.default_rng(0).integers(-3, 3, 7)}


def lookup(_: str) -> Case:
    random = np.random.default_rng(0)
    problem = Lookup(dense_view("int64", (6,)), dense_view("float32", (6, 20)), 11)
    return problem, [random.integers(-15, 15, (2, 6))], {"table": random.standard_normal((11, 20)).astype(np.float32)}


def cumulative(_: str) -> Case:
    problem = CumulativeSum(gapped("float32", (3, 7, 5)), gapped("float32", (3, 7, 5)), 1, exclusive=True, reverse=True)
    return problem, inputs_of(problem), {}


def cumulative_product(_: str) -> Case:
    problem = CumulativeSum(gapped("int32", (3, 7, 5)), gapped("int32", (3, 7, 5)), 1, product=True)
    return problem, inputs_of(problem), {}


def top_k(dtype: str, _: str) -> Case:
    """Return a TopK with ties, both zeros, and int64 that differ in their upper halves; the first of equals wins."""
    problem = TopK(gapped(dtype, (3, 70)), gapped(dtype, (3, 5)), gapped("int64", (3, 5)), largest=False)
    x, = inputs_of(problem)
    return problem, [np.rint(x * 2) if dtype == "float32" else (x << 40) - (x & 3)], {}


def nest(_: str) -> Case:
    """Return y[i, j] of x[i, k, j]: a sum of products in float64, and the index of the last maximum."""
    w = Writer((3, 5), (7,))
    x, z = w.read(0, "f64"), w.read(1, "f64")
    program = w.program(w.reduce("sum", x * z), w.reduce("last_max", x))
    problem = Nest((View("float64", (3, 5, 7), (280, 8, 40), 840), View("float64", (3, 5, 7), (0, 0, 8), 56)),
                   (gapped("float64", (3, 5)), gapped("int64", (3, 5))), (3, 5), (7,), program)
    x, z = (np.rint(array * 4) for array in inputs_of(problem))
    return problem, [x, np.broadcast_to(z[:, :1, :1], z.shape)], {}


def walk(_: str) -> Case:
    """Return a sum over the ends of walks through a table, whose last three entries lead to themselves.

    Threads that share an element end at different steps.
    """
    w = Writer((3,), (300,))
    start = w.read(0, "i32").to("i64") & 7
    ends = w.repeat_while([start, start + 1], lambda counters: [w.pick(1, "i64", [counter]) for counter in counters],
                          lambda counters: (counters[0] < 7) | (counters[1] < 7))
    problem = Nest((gapped("int32", (3, 300)), View("int64", (10,), (8,), 0)), (gapped("int64", (3,)),), (3,), (300,),
                   w.program(w.reduce("sum", ends[0] * 10 + ends[1])))
    x, _table = inputs_of(problem)
    table = np.minimum(np.arange(10) + [3, 1, 2, 5, 1, 4, 2, 0, 0, 0], 9)
    return problem, [x, np.broadcast_to(table, (len(x), 10))], {}


def long_nest(inside: bool, _: str) -> Case:
    """Return a nest with many inner iterations, whose threads share one loop or both.

    inside: y[i, j, k] is x[i, j, k] minus the maximum over j and k; else there are reductions of every dtype, one that
    uses another's result, and indices of extremes.
    """
    inner = (5, 700) if inside else (20, 100)
    w = Writer((3,), inner)
    x = w.read(0, "f32")
    most = w.reduce("max", x)
    results = [x - most] if inside else [
        w.reduce("sum", x - most), w.reduce("sum", x.to("f64")), w.reduce("last_min", x),
        w.reduce("max", x > 900), w.reduce("product", x.to("i32") & 3 | 1), w.reduce("first_max", x.to("i64"))]
    dtypes = ("float32",) if inside else ("float32", "float64", "int64", "bool", "int32", "int64")
    shape = (3, *inner) if inside else (3,)
    problem = Nest((gapped("float32", (3, *inner)),), tuple(gapped(dtype, shape) for dtype in dtypes), (3,), inner,
                   w.program(*results), inside)
    x, = inputs_of(problem)
    return problem, [np.rint(x * 100)], {}


def scatter(parts: int, _: str) -> Case:
    """Return a Scatter with colliding updates: few slices that threads share, or one for each thread."""
    x, updates = gapped("float32", (6, parts)), dense_view("float32", (9, parts))
    indices = View("int32", (9, parts), (4, 0), 36)
    w = Writer((9, parts))
    index = w.read(2, "i32").to("i64").within(6)
    problem = Scatter((x, updates, indices), dense_view("float32", (6, parts)), (9, parts),
                      w.program(w.read(1, "f32"), index, w.index(1)), "add")
    first, added, chosen = inputs_of(problem)
    return problem, [first, added, np.broadcast_to(chosen[:, :, :1] % 7 - 1, chosen.shape)], {}


def extreme(_: str) -> Case:
    """Return an Extreme with more rows than there are warps."""
    one = View("float32", (1,), (4,), 0)
    problem = Extreme((gapped("float32", (17, 3, 40)),), one, kind="max")
    return problem, inputs_of(problem), {}


def gather(_: str) -> Case:
    y, of_index = dense_view("float32", (3, 9)), dense_view("int32", (3, 9))
    problem = GatherElements(dense_view("float32", (4, 9)), y, of_index, 0)
    x, index = inputs_of(problem)
    return problem, [x, (index % 12 - 6).astype(np.int32)], {}


def rows(kind: type[RowProblem], precision: str, width: int = 100, **options: Any) -> Case:
    random, dtype = np.random.default_rng(0), STORED[precision]
    prologue, before = requantise(width, random, 0.02, accumulator=False)
    program, after = requantise(width, random, 20.0, residual=True)
    x, y = gapped(dtype, (5, width)), gapped(dtype, (5, width))
    problem = kind((x,), y, (y,), prologue, program, **options)
    return problem, inputs_of(problem), {"prologue": before["program"], "program": after["program"]}


def wide_sum(precision: str) -> Case:
    """Return a Reduce that is too wide for registers."""
    problem = Reduce((gapped(STORED[precision], (3, 1500)),), gapped("float32", (3, 1)))
    return problem, inputs_of(problem), {}


def product(precision: str, across: bool = True, rows: int = 19, depth: int = 44, columns: int = 37) -> Case:
    """Return a product whose broadcast second factor is plain, or transposed unless `across`."""
    dtype, integer = STORED[precision], precision == "int8"
    size = View(dtype, (), (), 0).size
    wide = -(-columns // 8) * 8         # distance between rows
    steps = (depth * wide * size, size, depth * size) if across else (depth * wide * size, wide * size, size)
    program, constants = requantise(columns, np.random.default_rng(0), 0.001 if integer else 1.0, residual=True)
    y = gapped(dtype, (2, rows, columns))
    problem = Product(gapped(dtype, (2, rows, depth)), View(dtype, (2, depth, columns), steps, 2 * steps[0]), y, (y,),
                      program, precision)
    return problem, inputs_of(problem), {"numbers": (3.0, 120.0) if integer else (0.0, 0.0), **constants}


def attention(precision: str, queries: int = 5, keys: int = 37, columns: tuple[int, int] = (12, 20),
              masked: bool = False) -> Case:
    """Return an attention. columns: of q and k, and of v. masked: with a mask for each query."""
    random, dtype, (depth, width) = np.random.default_rng(0), STORED[precision], columns
    program, constants = requantise(width, random, 0.1 if precision == "int8" else 1.0)
    query, key, value = (gapped(dtype, shape) for shape in ((2, queries, depth), (2, keys, depth), (2, keys, width)))
    rows = queries if masked else 1
    mask = View("float32", (2, queries, keys), (0, keys * 4 * masked, 4), rows * keys * 4)
    problem = Attention(query, key, value, gapped(dtype, (2, queries, width)), mask, program, precision)
    scale, zeros = (0.0002, (100.0, 0.0, 117.0)) if precision == "int8" else (1.0 / depth ** 0.5, (0.0, 0.0, 0.0))
    *factors, hidden = inputs_of(problem)
    hidden[...] = np.where(random.random((2, 1, rows, keys)) < 0.3, -np.inf, 0)
    if masked:
        hidden[0, :, 3, :-1] = -np.inf      # a query that sees one key at most
    hidden[1] = -np.inf         # an item that sees nothing
    return problem, [*factors, hidden], {"numbers": (scale, *zeros), **constants}


def attention_by_parts(kind: type[AttentionPeaks | AttentionSums | JoinedAttention], precision: str) -> Case:
    """Return one query's attention in three parts, the last of fewer keys."""
    whole, inputs, constants = attention(precision, 1, 150, (64, 32))
    peaks, sums = AttentionPeaks(whole, 3), AttentionSums(whole, 3)
    if sums.integers:
        inputs = [*inputs, *peaks.reference(inputs, constants)]
    if kind is JoinedAttention:
        inputs = [*sums.reference(inputs, constants), *inputs[-1:]][:3]
    return kind(whole, 3), inputs[:4] if kind is AttentionPeaks else inputs, constants


def recurrence(precision: str) -> Case:
    """Return a bidirectional GRU of two stages, with lengths for each item and states between -1 and 1."""
    layer = Layer(node_of("GRU", "bidirectional"), 37, precision, 11, lengths=True, states=True, steps=RECURRENT_STEPS)
    for state in layer.inputs[1:-1]:
        np.clip(state, -1, 1, out=state)
    return layer.spec, layer.inputs, layer.constants


def lstm(rounds: bool, precision: str) -> Case:
    """Return a bidirectional LSTM of one stage. rounds: its state is rounded before each step."""
    layer = Layer(node_of("LSTM", "bidirectional"), 37, precision, 11, states=rounds, rounds=rounds,
                  steps=RECURRENT_STEPS)
    return layer.spec, layer.inputs, layer.constants


class Family(NamedTuple):
    """Kernel family in the tests on GPUs.

    case: returns its problem in a precision. precisions: supported ones; CI runs the first. sums: floats are
    summed in another order than the reference's.
    """
    case: Callable[[str], Case]
    precisions: tuple[str, ...] = ("fp32",)
    sums: bool = False


_INT8, _BF16, _FP32 = (tuple(names.split()) for names in (
    "int8 fp16 bf16 fp32", "bf16 int8 fp16 fp32", "fp32 int8 fp16 bf16"))

FAMILIES: Mapping[str, Family] = {
    "convolution": Family(convolution, _INT8, True),
    **{f"convolution, {name}": Family(partial(convolution, **options), _INT8, True)
       for name, options in CONVOLUTIONS.items()},
    "partial sums": Family(partial_sums, _INT8, True), "sum of parts": Family(sum_of_parts, _INT8),
    "depthwise": Family(depthwise, _INT8, True), "product": Family(product, _INT8, True),
    "product of many": Family(partial(product, across=True, rows=70, depth=112, columns=80), _INT8, True),
    "product of many, across": Family(partial(product, across=False, rows=70, depth=112, columns=80), _INT8, True),
    "attention": Family(attention, _INT8, True),
    "attention of many": Family(partial(attention, queries=70, keys=150, columns=(64, 32)), _INT8, True),
    "attention of many, masked": Family(
        partial(attention, queries=20, keys=128, columns=(32, 64), masked=True), _INT8, True),
    "attention of one query": Family(partial(attention, queries=1, keys=150, columns=(64, 32)), _INT8, True),
    "attention's peaks": Family(partial(attention_by_parts, AttentionPeaks), ("int8",)),
    "attention's sums": Family(partial(attention_by_parts, AttentionSums), _INT8, True),
    "attention of parts": Family(partial(attention_by_parts, JoinedAttention), _INT8, True),
    "recurrence": Family(recurrence, ("int16", "int8", "fp32"), True),
    "lstm": Family(partial(lstm, False), ("int16", "int8", "fp32"), True),
    "lstm, rounded": Family(partial(lstm, True), ("int8",)),
    "pointwise": Family(pointwise, _INT8), "permute": Family(permute, _BF16), "average": Family(average, _INT8),
    "maximum": Family(maximum, _FP32), "global": Family(global_sum, _INT8), "resize": Family(resize, _INT8),
    "take": Family(partial(take, 1), _FP32), "take of channels": Family(partial(take, 2), _FP32),
    "softmax": Family(partial(rows, Softmax), _INT8), "layer norm": Family(partial(rows, Norm), _INT8),
    "response norm": Family(partial(rows, Lrn, width=20, alpha=2.0), _INT8), "wide sum": Family(wide_sum, _FP32),
    "functions": Family(functions), "integers": Family(integers), "lookup": Family(lookup), "gather": Family(gather),
    "cumulative": Family(cumulative), "cumulative product": Family(cumulative_product),
    "top k": Family(partial(top_k, "float32")),
    "top k of integers": Family(partial(top_k, "int64")),
    "nest": Family(nest), "nest with a cycle": Family(walk), "nest of many turns": Family(partial(long_nest, False)),
    "nest of many turns, stored inside": Family(partial(long_nest, True)), "scatter": Family(partial(scatter, 2)),
    "scatter of many parts": Family(partial(scatter, 1100)), "extreme": Family(extreme)}


# Problems with a tolerance.
CASES: Mapping[str, tuple[Callable[[], Case], float]] = {
    f"{name}, {precision}": (partial(family.case, precision), TOLERANCE[precision] if family.sums else 0)
    for name, family in FAMILIES.items() for precision in family.precisions}
