"""Products of two run-time tensors on every instruction set: int8 bit for bit, floats close, in any order of axes."""
from dataclasses import dataclass, replace

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX2, AVX512_BF16, AVX512_VNNI, AVX_VNNI, PORTABLE
from infer_server.engines.backends.llvm.kernels.matmul.product import ProductKernel, Tile
from infer_server.engines.backends.llvm.kernels.matmul.streamed import StreamedKernel, Streams
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.matmul import IntegerProduct, Product
from infer_server.engines.lowering.problems.view import View, dense_view
from infer_server.engines.plan.plan import SLACK
from scripts.testing.suite import check, gapped, random_array, requantise
from tests.engines.backends.llvm.jit import assembly, spills
from tests.engines.backends.llvm.runner import CpuRunner, DynamicRunner, kernel_of
from tests.engines.backends.runners import DOT_CPUS, EVERY_BACKEND, EVERY_ISA, by_name, every_float, rotated

BATCH = 2
STORED = {"int8": "uint8", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOLERANCE = {"int8": 0, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-3}


@dataclass(frozen=True)
class Shape:
    lead: tuple[int, ...]
    rows: int
    depth: int
    columns: int
    turned: bool = False        # b lies [..., N, K]
    shared: bool = False        # one b for all matrices of an item
    gaps: bool = False

    def spec(self, precision, program, stored="", result="", residual=True):
        dtype, view = stored or STORED[precision], gapped if self.gaps else dense_view
        last = (self.columns, self.depth) if self.turned else (self.depth, self.columns)
        b = view(dtype, (*self.lead, *last))
        if self.turned:
            b = View(dtype, (*b.shape[:-2], b.shape[-1], b.shape[-2]), (*b.strides[:-2], b.strides[-1], b.strides[-2]),
                     b.item)
        if self.shared:
            b = replace(b, strides=(*(0,) * len(self.lead), *b.strides[-2:]))
        y = view(result or dtype, (*self.lead, self.rows, self.columns))
        return Product(view(dtype, (*self.lead, self.rows, self.depth)), b, y, (y,) * residual, program, precision)


SHAPES = {
    "16x16x16": Shape((), 16, 16, 16),
    "nothing a multiple of anything": Shape((3,), 13, 15, 41, gaps=True),
    "columns contiguous": Shape((2, 2), 9, 37, 21, turned=True, gaps=True),
    "one b for all": Shape((3,), 5, 30, 150, shared=True),
    "one row, deep": Shape((), 1, 203, 70, turned=True),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def problem(shape, precision, stored="", result=""):
    random = np.random.default_rng(0)
    bytes_in = (stored or STORED[precision]) == "uint8"
    program, constants = requantise(shape.columns, random, (0.003 if bytes_in else 10) / shape.depth ** 0.5, True)
    spec = shape.spec(precision, program, stored, result)
    inputs = [random_array(random, view.dtype, (BATCH, *view.shape)) for view in spec.inputs]
    if shape.shared:
        inputs[1] = np.broadcast_to(inputs[1][(slice(None), *(slice(1),) * len(shape.lead))], inputs[1].shape)
    return spec, inputs, {"numbers": [118.0, 131.0] if bytes_in else [0.0, 0.0], **constants}


@EVERY_BACKEND
@EVERY_SHAPE
def test_a_product_of_bytes_equals_its_reference_bit_for_bit(shape, runner):
    spec, inputs, constants = problem(shape, "int8")
    assert spec.reference(inputs, constants)[0].std() > 10      # not all saturated
    check(spec, runner, inputs, constants, pieces=2, slack=4)


ZEROS = {str(zeros): zeros for zeros in (("uint8", "uint8"), ("uint8", ""), ("", "int8"), ("", ""))}


@rotated("shape, cpu, zeros", SHAPES, by_name(DOT_CPUS), ZEROS)
def test_a_product_with_zero_points_in_memory_is_exact(shape, zeros, cpu):
    """The sums exceed the integers that float32 represents."""
    exact_integers(shape, zeros, cpu)


@pytest.mark.parametrize("zeros", [("uint8", "int8"), ("uint8", "uint8")], ids=str)
@EVERY_SHAPE
def test_a_product_of_integers_may_have_dynamic_numbers(shape, zeros):
    exact_integers(shape, zeros, DynamicRunner(PORTABLE))


def exact_integers(shape, zeros, cpu):
    spec, inputs = integers(shape, zeros)
    check(spec, cpu, inputs, {}, pieces=2, slack=4)


def integers(shape, zeros):
    """Return a product whose sums are beyond what a float32 holds, and its inputs. zeros: dtypes of zero points."""
    shape = replace(shape, depth=shape.depth + 700)
    random = np.random.default_rng(0)
    signed = zeros[1] == "int8"
    plain = shape.spec("int8", EpilogueProgram(), result="int32")
    b = replace(plain.b, dtype="int8") if signed else plain.b
    spec = IntegerProduct(plain.a, b, plain.y, zero_a=number("uint8") if zeros[0] else None,
                          zero_b=number(zeros[1]) if zeros[1] else None)
    a, b = (random.integers(*ends, (BATCH, *view.shape)).astype(view.dtype) for view in (spec.a, spec.b)
            for ends in [(-128, -90) if view.dtype == "int8" else (220, 256)])
    if shape.shared:
        b = np.broadcast_to(b[(slice(None), *(slice(1),) * len(shape.lead))], b.shape)
    of_each = [np.full((BATCH, 1), value, view.dtype)
               for view, value in ((spec.zero_a, 100), (spec.zero_b, 101 if signed else 3)) if view]
    assert abs(spec.reference([a, b, *of_each], {})[0]).max() > 1 << 24
    return spec, [a, b, *of_each]


def number(dtype):
    """Return a view of one number for all items."""
    return View(dtype, (1,), (1,), 0)


@every_float(SHAPES)
def test_a_product_of_floats_agrees_with_its_reference(shape, precision, runner):
    spec, inputs, constants = problem(shape, precision, result="float32")
    check(spec, runner, inputs, constants, TOLERANCE[precision], pieces=2, slack=4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("isa", [AVX512_BF16, AVX2], ids=lambda isa: isa.name)
def test_bytes_may_be_multiplied_as_floats(isa, precision):
    spec, inputs, constants = problem(SHAPES["columns contiguous"], precision, stored="uint8", result="float32")
    check(spec, CpuRunner(isa), inputs, constants, 1e-4, slack=4)


@pytest.mark.parametrize("isa", [AVX512_VNNI, AVX2], ids=lambda isa: isa.name)
@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(3, 2), Tile(2, 4)], ids=str)
def test_the_tile_does_not_change_the_result(tile, isa):
    spec, inputs, constants = problem(SHAPES["nothing a multiple of anything"], "int8")
    check(spec, CpuRunner(isa), inputs, constants, tactic=tile, slack=4)


@EVERY_ISA
@pytest.mark.parametrize("shape", [SHAPES["one b for all"], Shape((), 1, 203, 70, gaps=True)], ids=str)
def test_few_rows_give_the_same_whether_the_right_factor_is_packed_or_not(shape, cpu):
    spec, inputs, constants = problem(shape, "fp32")
    first, *others = kernel_of(spec).tactics(cpu.isa)
    assert not first.packed and others[-1].packed
    for tile in (first, others[-1]):
        check(spec, cpu, inputs, constants, TOLERANCE["fp32"], tactic=tile, pieces=2, slack=4)


@pytest.mark.parametrize("cpu", [*map(CpuRunner, (AVX512_VNNI, AVX2, PORTABLE)), DynamicRunner(PORTABLE)],
                         ids=lambda cpu: cpu.name)
def test_a_large_right_factor_is_read_row_by_row_for_a_few_rows(cpu):
    for shape, given in ((Shape((), 1, 203, 331), None), (Shape((2,), 3, 258, 257, gaps=True), Streams(4, 8))):
        spec, inputs, constants = problem(shape, "fp32")
        streamed = StreamedKernel(spec)
        tactic = given or streamed.tactics(cpu.isa)[0]
        check(streamed, cpu, inputs, constants, TOLERANCE["fp32"], tactic=tactic, pieces=2, slack=SLACK)
        tile, costs = ProductKernel(spec), streamed.cost(cpu.isa, tactic)
        assert all(tile.cost(cpu.isa, one) > costs for one in tile.tactics(cpu.isa))
    small, more = Shape((), 1, 200, 300), Shape((), 5, 300, 300)
    assert not any(StreamedKernel(problem(shape, "fp32")[0]).tactics(cpu.isa) for shape in (small, more))


@pytest.mark.parametrize("precision, shape", [("int8", SHAPES["one b for all"]), ("fp32", SHAPES["one row, deep"]),
                                              ("fp32", SHAPES["16x16x16"])])
def test_a_right_factor_is_packed_where_it_cannot_be_read_as_it_lies_or_many_rows_read_it(precision, shape):
    assert all(tile.packed for tile in kernel_of(problem(shape, precision)[0]).tactics(AVX512_BF16))


@pytest.mark.parametrize("isa", [AVX512_BF16, AVX512_VNNI, AVX_VNNI, AVX2], ids=lambda isa: isa.name)
@pytest.mark.parametrize("precision", ["int8", "fp32", "bf16"])
def test_the_usual_winner_among_tiles_does_not_spill(precision, isa):
    spec = Shape((), 64, 64, 128).spec(precision, EpilogueProgram(), residual=False)
    assert spills_of(isa, precision, kernel_of(spec).tactics(isa)[0]) == 0


def test_a_tile_that_does_not_fit_is_seen_to_spill():
    assert spills_of(AVX512_VNNI, "int8", Tile(14, 4)) > 10


def spills_of(isa, precision, tile):
    """Return the spills in the micro-kernel of a whole tile, which is written last."""
    columns = tile.vectors * isa.lanes
    spec = Shape((), tile.rows, 64, columns).spec(precision, EpilogueProgram(), residual=False, result="float32")
    module = Module()
    kernel_of(spec).emit(module, "kernel", isa, tile)
    text = assembly(module.text(), isa)
    return spills(text[text.index(f"kernel_{tile.rows}x{columns}:"):])
