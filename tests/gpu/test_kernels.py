"""Kernels for GPUs, their PTX run on the CPU, against the exact references: a few problems of every family.

Everything else, by hand: INFER_TEST_GPUS=sm_61,sm_75,sm_80,sm_90a pytest tests/engines/backends
"""
from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from engines.backends.cuda.codegen.gpu import GPUS
from engines.backends.cuda.kernels.contraction.tile import Tile
from engines.backends.cuda.kernels.kernel import kernel_for
from engines.lowering.epilogue.program import ProgramBuilder
from engines.lowering.nest.program import Writer
from engines.lowering.problems.convolution import Contraction, Depthwise
from engines.lowering.problems.elementwise import CumulativeSum, Integers, Pointwise, TopK
from engines.lowering.problems.images import GlobalPool, Pool, Resize
from engines.lowering.problems.matmul import Attention, Product
from engines.lowering.problems.movement import GatherElements, HaloFill, Lookup, Permute, Take
from engines.lowering.problems.nest import Nest, Scatter
from engines.lowering.problems.problem import STORED, Array, Problem
from engines.lowering.problems.rows import Extreme, Lrn, Norm, Reduce, RowProblem, Softmax
from engines.lowering.problems.view import View, dense_view
from tests.engines.backends.cuda.runner import GpuRunner, Way, every_way, text_of, way_of
from tests.engines.backends.suite import check, gapped, random_array, requantise
from tests.engines.backends.test_recurrence import Case as Layer
from tests.engines.backends.test_recurrence import node_of
from tests.gpu.ptx.text import Fault

Case = tuple[Any, list[Array], dict[str, Any]]      # a problem, its inputs for two items, its constants
TOLERANCE = {"int8": 0, "fp32": 1e-4, "bf16": 4e-2, "fp16": 8e-3}


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


SMALL = {**dict.fromkeys(("sm_61", "sm_70", "sm_75"), Tile(32, 32, (2, 2), 64, 2)),
         "sm_80": Tile(32, 64, (1, 2), 64, 3),
         "sm_90a": Tile(64, 64, (4, 1), 128, 3, grouped=True)}


def by(tile: Tile, gpu: str, problem: Problem) -> Way:
    return Way(way_of(problem, GPUS[gpu]).kernel, tile)


@pytest.mark.parametrize(("gpu", "precision"), [
    *((gpu, "int8") for gpu in SMALL), ("sm_61", "fp16"), ("sm_75", "fp16"), ("sm_80", "fp16"), ("sm_90a", "fp16")])
def test_a_convolution_equals_its_reference_by_the_products_of_every_architecture(gpu: str, precision: str) -> None:
    problem, inputs, constants = convolution(precision)
    check(by(SMALL[gpu], gpu, problem), GpuRunner(GPUS[gpu]), inputs, constants, TOLERANCE[precision])


OTHERS = {
    "3 channels": dict(cin=3, cout=17, gap=0, taps=5, stride=2),
    "groups": dict(cin=24, cout=36, groups=4),
    "a product of matrices, odd": dict(cin=100, cout=70, taps=1, gap=0),
    "bfloat16": dict(precision="bf16"),
    "float32": dict(precision="fp32", cin=20),
    "bytes to floats": dict(stored="float32"),
}


@pytest.mark.parametrize("gpu", ["sm_61", "sm_80"])
@pytest.mark.parametrize("shape", OTHERS.values(), ids=OTHERS)
def test_convolutions_of_other_shapes_and_types_equal_theirs(shape: dict[str, Any], gpu: str) -> None:
    problem, inputs, constants = convolution(**shape)
    check(by(SMALL[gpu], gpu, problem), GpuRunner(GPUS[gpu]), inputs, constants, TOLERANCE[problem.precision])


# ---- the other families
def _pointwise() -> Case:
    program, constants = requantise(24, np.random.default_rng(0), residual=True, accumulator=False)
    view = gapped("uint8", (3, 5, 24))
    problem = Pointwise((view, gapped("int64", (3, 5, 24))), view, program)
    return problem, inputs_of(problem), constants


def _functions() -> Case:
    """Exponentials and the like are the same Python as for CPUs, and give the same bits."""
    b = ProgramBuilder(False)
    value = b.operand()
    for name in ("gelu", "tanh", "sigmoid", "log", "sin", "float16", "bfloat16", "exp", "erf"):
        value = b.add(name, value)
    view = dense_view("float32", (3, 7, 5))
    problem = Pointwise((view,), view, b.program(), uniform=True)
    return problem, inputs_of(problem), {"program": b.constants}


def _permute() -> Case:
    problem = Permute(View("bfloat16", (5, 6, 3), (12, 2, 60), 180), dense_view("bfloat16", (5, 6, 3)))
    return problem, inputs_of(problem), {}


def _integers() -> Case:
    view = dense_view("int32", (4, 9))
    problem = Integers((view, dense_view("int64", (4, 9))), dense_view("int64", (4, 9)), "modulo")
    return problem, inputs_of(problem), {}


def _pool() -> Case:
    program, constants = requantise(12, np.random.default_rng(0), residual=True)
    y = gapped("uint8", (4, 5, 12))
    problem = Pool(gapped("uint8", (7, 9, 12)), y, (y,), program, "average", (3, 3), (2, 2), (1, 1, 1, 1),
                   count_include_pad=True, pad_value=7)
    return problem, inputs_of(problem), constants


def _max_pool() -> Case:
    view = gapped("float32", (7, 9, 5))
    problem = Pool(view, view, (), ProgramBuilder(True).program(), "max", (3, 3), (1, 1), (2, 2, 2, 2), (2, 2))
    return problem, inputs_of(problem), {"program": []}


def _global_pool() -> Case:
    program, constants = requantise(24, np.random.default_rng(0), 1 / 35, residual=True)
    y = dense_view("uint8", (1, 1, 24))
    problem = GlobalPool(gapped("float32", (5, 7, 24)), y, (y,), program, "sum")
    return problem, inputs_of(problem), constants


def _depthwise(precision: str) -> Callable[[], Case]:
    def case() -> Case:
        random, dtype = np.random.default_rng(0), STORED[precision]
        program, constants = requantise(24, random, 0.02 if precision == "int8" else 3.0, residual=True)
        y = gapped(dtype, (5, 6, 24))
        problem = Depthwise(gapped(dtype, (11, 8, 24)), y, (y,), program, precision, (3, 3), (2, 1))
        weights = random_array(random, "int8" if precision == "int8" else "float32", (24, 1, 3, 3))
        return problem, inputs_of(problem), {"weights": weights, **constants}
    return case


def _resize() -> Case:
    program, constants = requantise(8, np.random.default_rng(0), residual=True)
    y, random = dense_view("uint8", (6, 8, 8)), np.random.default_rng(0)
    problem = Resize(dense_view("uint8", (3, 4, 8)), y, (y,), program, (2, 2))
    tables = {name: (random.integers(0, extent, (outputs, 2)), random.random((outputs, 2)).astype(np.float32))
              for name, outputs, extent in (("rows", 6, 3), ("columns", 8, 4))}
    return problem, inputs_of(problem), {**tables, **constants}


def _take(axis: int) -> Callable[[], Case]:
    def case() -> Case:
        shape = [4, 5, 16]
        shape[axis] = 7
        problem = Take(dense_view("float32", (4, 5, 16)), dense_view("float32", shape), axis)
        return problem, inputs_of(problem), {"index": np.random.default_rng(0).integers(-3, 3, 7)}
    return case


def _lookup() -> Case:
    random = np.random.default_rng(0)
    problem = Lookup(dense_view("int64", (6,)), dense_view("float32", (6, 20)), 11)
    return problem, [random.integers(-15, 15, (2, 6))], {"table": random.standard_normal((11, 20)).astype(np.float32)}


def _cumulative() -> Case:
    problem = CumulativeSum(gapped("float32", (3, 7, 5)), gapped("float32", (3, 7, 5)), 1, exclusive=True, reverse=True)
    return problem, inputs_of(problem), {}


def _cumulative_product() -> Case:
    problem = CumulativeSum(gapped("int32", (3, 7, 5)), gapped("int32", (3, 7, 5)), 1, product=True)
    return problem, inputs_of(problem), {}


def _top_k() -> Case:
    """Of many equals, and of both zeros, the first come first."""
    problem = TopK(gapped("float32", (3, 70)), gapped("float32", (3, 5)), gapped("int64", (3, 5)), largest=False)
    x, = inputs_of(problem)
    return problem, [np.rint(x * 2)], {}


def _nest() -> Case:
    """y[i, j] of x[i, k, j], a sum of products in float64 and where the last maximum is."""
    w = Writer((3, 5), (7,))
    x, z = w.read(0, "f64"), w.read(1, "f64")
    program = w.program(w.reduce("sum", x * z), w.reduce("last_max", x))
    problem = Nest((View("float64", (3, 5, 7), (280, 8, 40), 840), View("float64", (3, 5, 7), (0, 0, 8), 56)),
                   (gapped("float64", (3, 5)), gapped("int64", (3, 5))), (3, 5), (7,), program)
    x, z = (np.rint(array * 4) for array in inputs_of(problem))
    return problem, [x, np.broadcast_to(z[:, :1, :1], z.shape)], {}


def _scatter(parts: int) -> Callable[[], Case]:
    """Updates that meet, of few parts that threads share, or of a part for each thread."""
    def case() -> Case:
        x, updates = gapped("float32", (6, parts)), dense_view("float32", (9, parts))
        places = View("int32", (9, parts), (4, 0), 36)
        w = Writer((9, parts))
        place = w.read(2, "i32").to("i64").within(6)
        problem = Scatter((x, updates, places), dense_view("float32", (6, parts)), (9, parts),
                          w.program(w.read(1, "f32"), place, w.index(1)), "add")
        x, updates, places = inputs_of(problem)
        return problem, [x, updates, np.broadcast_to(places[:, :, :1] % 7 - 1, places.shape)], {}
    return case


def _extreme() -> Case:
    """Of more rows than there are warps."""
    one = View("float32", (1,), (4,), 0)
    problem = Extreme((gapped("float32", (17, 3, 40)),), one, kind="max")
    return problem, inputs_of(problem), {}


def _gather() -> Case:
    y, of_index = dense_view("float32", (3, 9)), dense_view("int32", (3, 9))
    problem = GatherElements(dense_view("float32", (4, 9)), y, of_index, 0)
    x, index = inputs_of(problem)
    return problem, [x, (index % 12 - 6).astype(np.int32)], {}


def _rows(kind: type[RowProblem], width: int = 100, **options: Any) -> Callable[[], Case]:
    def case() -> Case:
        random = np.random.default_rng(0)
        prologue, before = requantise(width, random, 0.02, accumulator=False)
        program, after = requantise(width, random, 20.0, residual=True)
        x, y = gapped("uint8", (5, width)), gapped("uint8", (5, width))
        problem = kind((x,), y, (y,), prologue, program, **options)
        return problem, inputs_of(problem), {"prologue": before["program"], "program": after["program"]}
    return case


def _wide_sum() -> Case:
    """Too wide to stay in registers."""
    problem = Reduce((gapped("float32", (3, 1500)),), gapped("float32", (3, 1)))
    return problem, inputs_of(problem), {}


def _product() -> Case:
    b = View("uint8", (2, 9, 6), (54, 1, 9), 108)       # its last two axes the other way round
    program, constants = requantise(6, np.random.default_rng(0), 0.001)
    problem = Product(gapped("uint8", (2, 7, 9)), b, gapped("uint8", (2, 7, 6)), (), program, "int8")
    return problem, inputs_of(problem), {"numbers": (3.0, 120.0), **constants}


def _attention(precision: str) -> Callable[[], Case]:
    def case() -> Case:
        random, dtype = np.random.default_rng(0), STORED[precision]
        program, constants = requantise(20, random, 0.1 if precision == "int8" else 1.0)
        query, key, value = (gapped(dtype, shape) for shape in ((2, 5, 12), (2, 37, 12), (2, 37, 20)))
        mask = View("float32", (2, 5, 37), (0, 0, 4), 37 * 4)
        problem = Attention(query, key, value, gapped(dtype, (2, 5, 20)), mask, program, precision)
        scale, zeros = (0.0002, (100.0, 0.0, 117.0)) if precision == "int8" else (0.3, (0.0, 0.0, 0.0))
        *factors, hidden = inputs_of(problem)
        hidden[...] = np.where(random.random((2, 1, 1, 37)) < 0.3, -np.inf, 0)
        hidden[1] = -np.inf         # an item that sees nothing
        return problem, [*factors, hidden], {"numbers": (scale, *zeros), **constants}
    return case


FAMILIES: dict[str, Callable[[], Case]] = {
    "pointwise": _pointwise, "functions": _functions, "permute": _permute, "integers": _integers, "average": _pool,
    "maximum": _max_pool, "global": _global_pool, "depthwise": _depthwise("int8"), "resize": _resize,
    "depthwise of halves": _depthwise("fp16"), "take": _take(1), "take of channels": _take(2), "lookup": _lookup,
    "gather": _gather, "cumulative": _cumulative, "cumulative product": _cumulative_product, "top k": _top_k,
    "nest": _nest, "scatter": _scatter(2), "scatter of many parts": _scatter(1100), "extreme": _extreme,
    "softmax": _rows(Softmax), "layer norm": _rows(Norm), "response norm": _rows(Lrn, 20, alpha=2.0),
    "wide sum": _wide_sum, "product": _product, "attention": _attention("int8")}


# What benchmarks/gpu.py runs on a real GPU, each by all of its tactics, with its tolerance.
CASES: dict[str, tuple[Callable[[], Case], float]] = {
    **{f"convolution, {precision}": (partial(convolution, precision), tolerance)
       for precision, tolerance in TOLERANCE.items()},
    **{f"convolution, {name}": (partial(convolution, **options), TOLERANCE[options.get("precision", "int8")])
       for name, options in OTHERS.items()},
    **{name: (case, 0 if name != "depthwise of halves" else TOLERANCE["fp16"]) for name, case in FAMILIES.items()},
    "attention of floats": (_attention("fp32"), 1e-5)}


@pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)
def test_every_family_equals_its_reference_bit_for_bit(case: Callable[[], Case]) -> None:
    check(*_runner(case()))


@pytest.mark.parametrize(("precision", "tolerance"), [("int16", 0), ("fp32", 1e-5)])
def test_a_recurrent_layer_equals_its_reference(precision: str, tolerance: float) -> None:
    """A GRU of two stages, both ways, items of lengths of their own."""
    layer = Layer(node_of("GRU", "bidirectional"), 37, precision, lengths=True, states=True)
    check(layer.spec, GpuRunner(GPUS["sm_80"]), layer.inputs, layer.constants, tolerance)


def test_an_attention_of_floats_agrees_with_its_reference() -> None:
    check(*_runner(_attention("fp32")()), tolerance=1e-5)


@pytest.mark.parametrize(("gpu", "precision", "ways"), [
    ("sm_61", "int8", 1), ("sm_75", "int8", 2), ("sm_75", "fp16", 2), ("sm_90a", "int8", 2), ("sm_80", "bf16", 2)])
def test_an_attention_equals_its_reference_by_queries_and_by_tiles_of_them(gpu: str, precision: str, ways: int) -> None:
    problem, inputs, constants = _attention(precision)()
    found = every_way(problem, GPUS[gpu])
    assert len(found) == ways
    for way in found:
        check(way, GpuRunner(GPUS[gpu]), inputs, constants, TOLERANCE[precision])


def test_an_attention_of_many_keys_is_one_of_tiles() -> None:
    view = dense_view("uint8", (2, 2048, 32))
    problem = Attention(view, view, view, view, None, ProgramBuilder(True).program(), "int8")
    way, = every_way(problem, GPUS["sm_80"])
    assert str(way.tactic) == "16 queries a warp"
    kernel = kernel_for(problem, GPUS["sm_61"], (256,) * 4)
    assert kernel and kernel.refusal == "more than 1024 keys of an attention"


@pytest.mark.parametrize(("gpu", "precision", "across"), [
    ("sm_75", "int8", False), ("sm_80", "int8", True), ("sm_80", "fp16", False), ("sm_80", "bf16", True)])
def test_a_product_of_two_tensors_equals_its_reference_by_tiles(gpu: str, precision: str, across: bool) -> None:
    """Of 19 x 44 and 44 x 37, the second as it is or with its last two axes the other way round; both repeat."""
    dtype, size = STORED[precision], np.dtype(STORED[precision] if precision != "bf16" else "float16").itemsize
    steps = (44 * 40 * size, size, 44 * size) if across else (44 * 40 * size, 40 * size, size)
    program, constants = requantise(37, np.random.default_rng(0), 0.001 if precision == "int8" else 1.0, residual=True)
    y = gapped(dtype, (2, 19, 37))
    problem = Product(gapped(dtype, (2, 19, 44)), View(dtype, (2, 44, 37), steps, 2 * steps[0]), y, (y,), program,
                      precision)
    first, *_ = found = every_way(problem, GPUS[gpu])
    assert len(found) == 2 and str(first.tactic) == "16 x 32 a warp"
    numbers = (3.0, 120.0) if precision == "int8" else (0.0, 0.0)
    check(first, GpuRunner(GPUS[gpu]), inputs_of(problem), {"numbers": numbers, **constants}, TOLERANCE[precision])


def _runner(case: Case) -> tuple[Any, ...]:
    problem, inputs, constants = case
    return problem, GpuRunner(GPUS["sm_80"]), inputs, constants


def test_a_halo_is_filled_and_nothing_beside_it() -> None:
    runs = (View("uint8", (1, 9), (9, 1), 63), View("uint8", (4, 2), (7, 1), 63), View("uint8", (1, 3), (3, 1), 63))
    problem, memory = HaloFill(runs, 7), [np.full(200, 1, np.uint8) for _ in runs]
    GpuRunner(GPUS["sm_61"]).execute(problem, [], memory, {}, 2)
    for view, found in zip(runs, memory, strict=True):
        places = [n * view.item + i * view.strides[0] + j for n in (0, 1) for i in range(view.shape[0])
                  for j in range(view.shape[1])]
        assert (found[places] == 7).all() and (np.delete(found, places) == 1).all()


# ---- what is wrong is found
PLANTED = {
    "no barrier": (r"bar\.sync[^;]*;", ""),
    "waits for too few copies": (r"(cp\.async\.wait_group\s+)1;", r"\g<1>2;"),
    "copies that nobody commits": (r"cp\.async\.commit_group;", ""),
    "signed pixels": (r"u8\.s8\.s32", "s8.s8.s32"),
    "no rounding": (r"0f4B400000", "0f00000000"),
    "chunks of a row exchanged where they are read": (r"(xor\.b32\s+%r\d+, %r\d+), 32;", r"\1, 16;"),
    "tiles of the wrong rows": (r"(ldmatrix[^;]*\+)1024\]", r"\g<1>2048]"),
    "a pixel too many": (r"setp\.(gt|ge|lt|hs|lo)\.u32\s+(%p\d+), (%r\d+), (%r\d+);", r"setp.ne.s32 \2, \3, -1;"),
    "a tail that is copied whole": (r"(cp\.async[^;]*), 16, %r\d+;", r"\1, 16, 16;"),
    "a store beside its place": (r"(st\.global[^\[]*\[%rd\d+)\]", r"\1+16]"),
    "constants of another channel": (r"(ld\.global[^\[]*v4[^\[]*\[%rd\d+)\]", r"\1+16]"),
    "a load of the wrong width": (r"ld\.global(\.nc)?\.v4\.b32", r"ld.global\1.v2.b32"),
    "copies that wgmma may not see": (r"fence\.proxy\.async[^;]*;", ""),
}


@pytest.mark.parametrize(("what", "change"), PLANTED.items(), ids=PLANTED)
def test_a_planted_fault_is_found(what: str, change: tuple[str, str]) -> None:
    problem, inputs, constants = convolution(cout=64)
    gpu = "sm_90a" if "wgmma" in what else "sm_80"
    way = by(SMALL[gpu], gpu, problem)
    broken = re.sub(*change, text_of(way))
    assert broken != text_of(way), "what is to be broken is not there any more"
    with pytest.raises((Fault, AssertionError)):
        check(way, GpuRunner(GPUS[gpu]), inputs, constants, text=broken)


def test_what_is_read_past_a_tensor_is_found() -> None:
    problem, inputs, constants = convolution()
    way, runner = by(SMALL["sm_80"], "sm_80", problem), GpuRunner(GPUS["sm_80"])
    x, residual = ([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in inputs])
    with pytest.raises(Fault, match="outside of what is allocated"):
        runner.execute(way, [x, residual], [np.zeros(problem.y.item * 2, np.uint8)], constants, 2)
