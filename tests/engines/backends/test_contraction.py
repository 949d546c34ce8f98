"""Contractions on every instruction set: integers exact, floats close, whatever the tile, the tail and the cut."""
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX2, AVX512_BF16, AVX512_VNNI, AVX_VNNI
from infer_server.engines.backends.llvm.kernels.contraction.direct import DirectContraction
from infer_server.engines.backends.llvm.kernels.contraction.paired import PairedContraction
from infer_server.engines.backends.llvm.kernels.contraction.taps import TapAxis
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile, tiles_of_the_batch
from infer_server.engines.backends.llvm.kernels.few_couts.dots import DotContraction, DotTile
from infer_server.engines.backends.llvm.kernels.kernel import kernels_for
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.epilogue.program import EpilogueProgram, ProgramBuilder
from infer_server.engines.lowering.problems.convolution import BlockedProduct, Contraction, RoundedProduct
from infer_server.engines.lowering.problems.view import Halo, View, dense_view
from infer_server.engines.ops.blocks import QuantizeBlocks
from scripts.testing.suite import check, gapped, random_array, requantise, run
from tests.engines.backends.llvm.jit import assembly, spills
from tests.engines.backends.llvm.runner import CpuRunner, kernel_of
from tests.engines.backends.runners import (
    ALL_COMBINATIONS,
    DOT_CPUS,
    EVERY_BACKEND,
    EVERY_DOT,
    EVERY_ISA,
    RUNNERS,
    by_name,
    every_float,
    rotated,
)

BATCH = 2
STORED = {"int8": "uint8", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Sums in another order; in half precision, a unit in the last place.
TOLERANCE = {"int8": 0, "fp32": 1e-4, "bf16": 4e-2, "fp16": 8e-3}


@dataclass(frozen=True)
class Shape:
    rows: int
    cols: int
    cin: int
    cout: int
    taps: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    gaps: bool = False
    planes: int = 0         # depth of a volume; 0 for an image

    def spec(self, precision, program, stored="", residual=True):
        view = gapped if self.gaps else dense_view
        outputs = (*[self.planes] * bool(self.planes), self.rows, self.cols)
        reach = [(n - 1) * s + (t - 1) * d + 1 for n, s, t, d in
                 zip(outputs, self.stride, self.taps, self.dilation, strict=True)]
        y = view(stored or STORED[precision], (*outputs, self.cout))
        return Contraction(view(STORED[precision], (*reach, self.cin)), y, (y,) * residual, program, precision,
                           self.taps, self.stride, self.dilation, self.groups)


SHAPES = {
    "3x3": Shape(7, 14, 16, 64, taps=(3, 3)),
    "1x1 of one long row": Shape(7, 9, 24, 40),
    "strided, odd couts, gaps": Shape(5, 6, 12, 17, taps=(3, 3), stride=(2, 2), gaps=True),
    "stem: 3 channels, a run of 21 bytes": Shape(4, 9, 3, 17, taps=(7, 7), stride=(2, 2)),
    "dilated, one dimension": Shape(5, 6, 10, 33, taps=(3, 1), dilation=(2, 1)),
    "groups": Shape(5, 6, 24, 36, taps=(3, 3), stride=(1, 2), dilation=(2, 1), groups=4),
    "few couts": Shape(5, 27, 10, 3, taps=(3, 3)),
    "one cout": Shape(3, 19, 7, 1, taps=(5, 5)),
    "few couts, dilated, gaps": Shape(5, 6, 40, 4, taps=(3, 2), stride=(1, 2), dilation=(2, 3), gaps=True),
    "volumes of two couts": Shape(2, 5, 8, 2, (2, 3, 3), (1, 1, 1), (1, 1, 1), planes=2),
    "two scores of an item": Shape(1, 1, 100, 2),
    "groups of few couts": Shape(4, 9, 24, 16, taps=(3, 3), groups=2),
    "gemm of one row an item": Shape(1, 1, 100, 70),
    "volumes": Shape(3, 6, 12, 17, (3, 3, 2), (2, 1, 1), (2, 1, 1), gaps=True, planes=3),
    "volumes of long rows": Shape(2, 5, 8, 40, (2, 1, 1), (1, 1, 1), (1, 1, 1), planes=4),
    "volumes, 3x3x3": Shape(5, 6, 16, 24, (3, 3, 3), (1, 1, 1), (1, 1, 1), planes=2),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def problem(shape, precision, stored="", residual=True):
    """Return (spec, inputs, constants) with sums around the middle of u8."""
    random = np.random.default_rng(0)
    k = shape.cin // shape.groups * math.prod(shape.taps)
    scale = (0.005 if precision == "int8" else 10) / k**0.5
    program, constants = requantise(shape.cout, random, scale, residual)
    spec = shape.spec(precision, program, stored, residual)
    weights = random_array(random, "int8" if precision == "int8" else "float32",
                           (shape.cout, shape.cin // shape.groups, *shape.taps))
    inputs = [random_array(random, view.dtype, (BATCH, *view.shape)) for view in spec.inputs]
    return spec, inputs, {"weights": weights, **constants}


@EVERY_BACKEND
@EVERY_SHAPE
def test_an_integer_contraction_equals_its_reference_bit_for_bit(shape, runner):
    spec, inputs, constants = problem(shape, "int8")
    assert spec.reference(inputs, constants)[0].std() > 10      # not all saturated
    for way in runner.ways(spec):
        check(way, runner, inputs, constants, pieces=2, slack=15)


SCALED = {str(shape): shape for shape in (Shape(7, 9, 24, 40), Shape(1, 37, 100, 70), Shape(1, 1, 100, 70))}


@rotated("runner, shape, long", by_name(RUNNERS), SCALED, {"short": False, "long": True})
def test_a_scale_of_each_row_multiplies_its_sums(long, shape, runner):
    random, couts = np.random.default_rng(0), shape.cout
    b = ProgramBuilder(True)
    sums = b.add("fma", b.accumulator, b.constant(random.uniform(0.001, 0.002, couts)),
                 b.constant(random.uniform(-9, 9, couts)))
    value = b.add("fma", b.operand(), sums, b.constant(random.uniform(20, 90, couts)))
    value = b.add("gelu_u8", value) if long else value
    of_row = View("float32", (shape.rows, shape.cols, couts), (4 * shape.cols, 4, 0), 4 * shape.cols * shape.rows)
    spec, (x, _), constants = problem(shape, "int8")
    spec = replace(spec, operands=(of_row,), program=b.program())
    scales = np.broadcast_to(random.uniform(0.1, 9, (*x.shape[:-1], 1)).astype(np.float32), (BATCH, *spec.y.shape))
    constants = {"weights": constants["weights"], "program": b.constants}
    for way in runner.ways(spec):
        check(way, runner, [x, scales], constants, pieces=2, slack=15)


@every_float(SHAPES)
def test_a_float_contraction_agrees_with_its_reference(shape, precision, runner):
    spec, inputs, constants = problem(shape, precision)
    if precision == "bf16":     # a rounding to the other side is one unit of 2**-8
        constants["weights"] = constants["weights"] / 4
    for way in runner.ways(spec):
        check(way, runner, inputs, constants, TOLERANCE[precision], pieces=2, slack=15)


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["gemm of one row an item", "1x1 of one long row"])
def test_floats_are_multiplied_by_weights_that_stay_bytes(name, runner):
    spec, inputs, constants = problem(SHAPES[name], "fp32")
    integers = random_array(np.random.default_rng(1), "int8", constants["weights"].shape)
    check(replace(spec, weights="int8"), runner, inputs, {**constants, "weights": integers}, 1e-4, slack=15, pieces=2)


@EVERY_BACKEND
@pytest.mark.parametrize("block, centred", [(32, True), (16, False), (70, False)])
def test_weights_of_four_bits_have_a_scale_for_each_block(block, centred, runner):
    shape, random = SHAPES["gemm of one row an item"], np.random.default_rng(1)
    spec, (x, residual), constants = problem(replace(shape, cin=77), "fp32")
    numbers = [random.uniform(low, 1, (shape.cout, -(-77 // block))).astype(np.float32) for low in (0.5, -1)]
    scales, offsets = numbers[0], -8 * numbers[0] if centred else numbers[1]
    spec = BlockedProduct(spec.x, spec.y, spec.operands, spec.program, "fp32", block=block, centred=centred)
    weights = random.integers(0, 16, (shape.cout, 77)).astype(np.uint8)
    more = [np.concatenate([array] * 4)[:7] for array in (x, residual)]
    check(spec, runner, more, {**constants, "weights": weights, "scales": scales, "offsets": offsets}, 1e-4, pieces=2,
          slack=15)


@EVERY_DOT
@pytest.mark.parametrize("block, centred", [(32, True), (16, False), (128, True)])
@pytest.mark.parametrize("rows", [1, 7])
def test_rows_that_are_rounded_by_the_same_blocks_are_multiplied_as_integers(rows, block, centred, cpu):
    depth, random = 77, np.random.default_rng(1)
    shape = Shape(1, rows, depth, 70)
    spec, (x, residual), constants = problem(shape, "fp32")
    numbers = [random.uniform(low, 1, (shape.cout, -(-depth // block))).astype(np.float32) for low in (0.5, -1)]
    scales, offsets = numbers[0], -8 * numbers[0] if centred else numbers[1]
    x = QuantizeBlocks.compute(Node("QuantizeBlocks", (), (), {"block": block}), x)
    spec = RoundedProduct(dense_view("int8", x.shape[1:]), spec.y, spec.operands, spec.program, "int8", block=block,
                          centred=centred)
    weights = random.integers(0, 16, (shape.cout, depth)).astype(np.uint8)
    constants |= {"weights": weights, "scales": scales, "offsets": offsets}
    kernel, = cpu.ways(spec)
    first, *others = kernel.tactics(cpu.isa)
    every = (*others, replace(first, prefetch=True))
    some = every[(DOT_CPUS.index(cpu) + rows) % 2::1 if ALL_COMBINATIONS else 2] if block == 32 else (
        others[len(others) // 2],)
    for tactic in (first, *some):
        check(spec, cpu, [x, residual], constants, 1e-4, pieces=2, tactic=tactic)


def test_a_nan_behind_an_odd_run_stays_out():
    """A pair of bfloat16 would reach into the next group, where the weight is zero, but NaN times zero is NaN."""
    spec, (x, *others), constants = problem(Shape(1, 3, 10, 32, groups=2), "bf16", stored="float32")
    expected, = run(spec, CpuRunner(AVX512_BF16), [x, *others], constants)
    x[..., 5] = 0x7FC0
    got, = run(spec, CpuRunner(AVX512_BF16), [x, *others], constants)
    np.testing.assert_array_equal(got[..., :16], expected[..., :16])
    assert (got[..., 16:] != expected[..., 16:]).any()


@EVERY_ISA
@pytest.mark.parametrize("tile", [Tile(1, 3, 1), Tile(2, 3, 2, 1), Tile(1, 5, 4, 1, prefetch=True), Tile(1, 14, 2)],
                         ids=str)
def test_the_tile_does_not_change_the_result(tile, cpu):
    if tile.cols * tile.vectors > cpu.isa.registers:
        pytest.skip(f"{tile} is made for more registers than {cpu.isa.name} has")
    for shape in ("3x3", "1x1 of one long row", "gemm of one row an item"):
        spec, inputs, constants = problem(SHAPES[shape], "int8")
        fitting = replace(tile, cols=min(tile.cols, DirectContraction(spec).flat.cols))
        check(spec, cpu, inputs, constants, tactic=fitting, slack=15)


BOTH_LAYOUTS = pytest.mark.parametrize("kernel", [DirectContraction, PairedContraction])


@BOTH_LAYOUTS
@EVERY_SHAPE
def test_both_layouts_of_weights_give_the_same_result(shape, kernel):
    spec, inputs, constants = problem(shape, "int8")
    tile = kernel(spec).tactics(AVX2)[0]
    for prefetch in (False, True):
        check(kernel(spec), CpuRunner(AVX2), inputs, constants, tactic=replace(tile, prefetch=prefetch), slack=15)


@BOTH_LAYOUTS
def test_channels_whose_weights_are_all_zero_give_their_bias(kernel):
    """Paired weights have no step for such channels."""
    spec, inputs, constants = problem(SHAPES["1x1 of one long row"], "int8")
    constants["weights"][:16] = 0
    check(kernel(spec), CpuRunner(AVX2), inputs, constants, slack=15)


BORDERED = {
    "both sides in one tile": (Shape(7, 7, 16, 40, taps=(3, 3)), Halo(1, 1, 1, 1)),
    "tiles between, gaps, strided": (Shape(5, 9, 8, 20, taps=(3, 3), stride=(2, 2), gaps=True), Halo(1, 1, 1, 1)),
    "wide and dilated": (Shape(6, 7, 12, 16, taps=(5, 3), dilation=(2, 2)), Halo(4, 2, 4, 2)),
    "a stem, odd run": (Shape(5, 9, 3, 16, taps=(7, 7), stride=(2, 2)), Halo(3, 3, 2, 2)),
    "rows of nothing but border": (Shape(5, 4, 8, 16, taps=(2, 1)), Halo(3, 0, 2, 0)),
    "a padded 1x1, strided": (Shape(7, 7, 12, 33, stride=(2, 2)), Halo(3, 3, 3, 3)),
}


def zeros_around(x, border):
    """Return x with its border set to 0."""
    height, width = x.shape[1:3]
    inside = (slice(border.top, height - border.bottom), slice(border.left, width - border.right))
    result = np.zeros_like(x)
    result[:, *inside] = x[:, *inside]
    return result


SKIPPING = {str(tile): tile for tile in (Tile(1, 3, 2, 2, skip=True), Tile(2, 7, 1, skip=True))}


@rotated("cpu, bordered, tile", by_name(DOT_CPUS), BORDERED, SKIPPING)
def test_taps_in_a_border_of_zeros_are_left_out(bordered, tile, cpu):
    shape, border = bordered
    spec, (x, *others), constants = problem(shape, "int8")
    spec = replace(spec, border=border)
    tile = replace(tile, cols=min(tile.cols, shape.cols))
    check(spec, cpu, [zeros_around(x, border), *others], constants, tactic=tile, pieces=2, slack=4)


@EVERY_ISA
@pytest.mark.parametrize("shape, border", BORDERED.values(), ids=BORDERED)
def test_dot_products_leave_out_rows_of_taps_in_a_border_of_zeros(shape, border, cpu):
    """The rows above and below hold other numbers, so the result is right only if they are skipped."""
    spec, (x, *others), constants = problem(replace(shape, cout=3), "fp32")
    spec, tile = replace(spec, border=border), DotTile(1, min(3, shape.cols), 1, 2, skip=True)
    between_columns = zeros_around(x, replace(border, top=0, bottom=0))
    got, = run(DotContraction(spec), cpu, [between_columns, *others], constants, tactic=tile, slack=4)
    expected, = spec.reference([zeros_around(x, border), *others], constants)
    np.testing.assert_allclose(got, expected, TOLERANCE["fp32"], TOLERANCE["fp32"])


@pytest.mark.parametrize("name", ["both sides in one tile", "a padded 1x1, strided"])
def test_what_lies_in_the_border_is_not_looked_at(name):
    """The border holds other bytes than its fill, so the result is right only if its taps are skipped."""
    shape, border = BORDERED[name]
    spec, (x, *others), constants = problem(shape, "int8")
    spec, tile = replace(spec, border=border), Tile(1, 7, 2, skip=True)
    got, = run(spec, CpuRunner(AVX2), [x, *others], constants, tactic=tile, slack=4)
    expected, = spec.reference([zeros_around(x, border), *others], constants)
    np.testing.assert_array_equal(got, expected)
    assert (expected != spec.reference([x, *others], constants)[0]).any()


@pytest.mark.parametrize("axis", [TapAxis(9, 1, 1, 3, 1, 1), TapAxis(9, 1, 0, 3, 2, 1), TapAxis(15, 4, 4, 5, 1, 2),
                                  TapAxis(6, 3, 2, 2, 1, 1)])
def test_live_taps_are_those_that_read_inside(axis):
    outputs = range((axis.extent - (axis.taps - 1) * axis.dilation - 1) // axis.stride + 1)
    inside = {o: [tap for tap in range(axis.taps)
                  if axis.before <= o * axis.stride + tap * axis.dilation < axis.extent - axis.after] for o in outputs}
    assert {o: list(axis.live(o)) for o in outputs} == inside
    runs = axis.runs(outputs)
    assert [who for count, who in runs for _ in range(count)] == [
        {o for o in outputs if tap in inside[o]} for tap in range(axis.taps)]


@EVERY_BACKEND
def test_quantised_sums_may_be_stored_as_floats(runner):
    spec, inputs, constants = problem(Shape(3, 5, 20, 37), "int8", stored="float32", residual=False)
    check(spec, runner, inputs, constants, slack=15)


@EVERY_BACKEND
def test_any_batch_of_a_matrix_product_is_cut_into_tiles_of_its_bits(runner):
    spec, inputs, constants = problem(SHAPES["gemm of one row an item"], "int8")
    assert kernel_of(spec).by_batch
    for batch in (1, 3, 13):
        check(spec, runner, [np.resize(x, (batch, *x.shape[1:])) for x in inputs], constants, slack=15, pieces=2)


@EVERY_ISA
@pytest.mark.parametrize("precision", ["int8", "fp32", "bf16"])
def test_rows_of_a_batch_fill_tiles_whatever_their_number(precision, cpu):
    """There are full tiles, tails of any size and several blocks; no tile is taller than its batch."""
    spec, inputs, constants = problem(SHAPES["gemm of one row an item"], precision)
    many = kernels_for(spec, 13)[0]
    tallest = max(many.tactics(cpu.isa), key=lambda tile: tile.cols)
    assert 1 < tallest.cols <= 13 and {tile.cols for tile in kernel_of(spec).tactics(cpu.isa)} == {1}
    for batch, block in ((1, 0), (13, 0), (2 * tallest.cols + 7, 1)):
        check(many, cpu, [np.resize(x, (batch, *x.shape[1:])) for x in inputs], constants, TOLERANCE[precision],
              tactic=replace(tallest, block=block), slack=15, pieces=2)


def test_the_batch_makes_a_difference_to_what_is_cut_by_it_only():
    image, row = (problem(SHAPES[name], "int8")[0] for name in ("3x3", "gemm of one row an item"))
    assert kernels_for(image, 13) == kernels_for(image) and kernels_for(row, 13) != kernels_for(row)


@pytest.mark.parametrize("pixels", [1, 5, 6, 31, 96])
@pytest.mark.parametrize("cols", [1, 4, 6, 14])
def test_the_tiles_of_a_batch_hold_all_of_its_pixels(pixels, cols):
    assert sum(size * count for size, count in tiles_of_the_batch(pixels, cols)) == pixels


def test_halves_round_to_even():
    b = ProgramBuilder(True)
    b.add("mul", b.accumulator, 0.5)
    spec = Shape(1, 16, 4, 16).spec("int8", b.program(), residual=False)
    x = np.random.default_rng(0).integers(0, 4, (BATCH, 1, 16, 4)).astype(np.uint8)
    w = np.random.default_rng(1).integers(-3, 8, (16, 4, 1, 1)).astype(np.int8)
    halves = np.einsum("nijc,oc->nijo", x.astype(int), w[:, :, 0, 0].astype(int)) / 2
    check(spec, CpuRunner(AVX2), [x], {"weights": w, "program": b.constants}, slack=15)
    expected, = spec.reference([x], {"weights": w, "program": b.constants})
    assert (expected == np.clip([round(h) for h in halves.flat], 0, 255).reshape(halves.shape)).all()
    assert (expected != np.clip(np.floor(halves + 0.5), 0, 255)).any()      # the control: rounding up is told apart


@pytest.mark.parametrize("isa", [AVX512_BF16, AVX512_VNNI, AVX_VNNI, AVX2], ids=lambda isa: isa.name)
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_the_usual_winner_among_tiles_does_not_spill(precision, isa):
    assert spills_of(isa, precision, kernel_of(_wide(isa, precision)).tactics(isa)[0]) <= 2


def test_a_tile_that_does_not_fit_is_seen_to_spill():
    assert spills_of(AVX512_VNNI, "int8", Tile(1, 14, 4)) > 10


def _wide(isa, precision):
    return Shape(1, 64, 64, 4 * isa.lanes).spec(precision, EpilogueProgram(), residual=False)


def spills_of(isa, precision, tile):
    spec = Shape(1, tile.cols, 256, tile.vectors * isa.lanes).spec(precision, EpilogueProgram(), residual=False)
    module = Module()
    kernel_of(spec).emit(module, "kernel", isa, tile)
    return spills(assembly(module.text(), isa))


def test_a_pass_of_a_k_loop_takes_several_short_turns_each_of_which_loads_for_itself():
    spec = Shape(1, 6, 258, 16).spec("fp32", EpilogueProgram(), residual=False)
    module = Module()
    kernel_of(spec).emit(module, "kernel", AVX2, Tile(1, 6, 2))
    assert "; for k in 0..64" in module.text(), "of 258 turns two are left"
    assert spills(assembly(module.text(), AVX2)) == 0


@pytest.mark.parametrize("isa", [AVX2, AVX512_VNNI])
@pytest.mark.parametrize("couts", [1, 2, 3, 5, 8])
def test_dot_products_of_few_couts_keep_their_sums_in_registers(couts, isa):
    spec = Shape(8, 24, 40, couts, taps=(3, 3)).spec("fp32", EpilogueProgram(), residual=False)
    for tactic in DotContraction(spec).tactics(isa):
        module = Module()
        DotContraction(spec).emit(module, "kernel", isa, tactic)
        assert spills(assembly(module.text(), isa)) == 0, tactic


def test_dot_products_are_for_few_couts_that_have_much_to_sum():
    def fastest(couts, channels):
        spec = Shape(8, 24, channels, couts, taps=(3, 3)).spec("fp32", EpilogueProgram(), residual=False)
        ways = [(kernel.cost(AVX2, tactic), type(kernel).__name__) for kernel in kernels_for(spec)
                for tactic in kernel.tactics(AVX2)]
        return min(ways)[1]

    assert fastest(1, 40) == DotContraction.__name__
    assert fastest(16, 40) != DotContraction.__name__
    assert fastest(4, 1) != DotContraction.__name__


def test_tiles_across_a_row_are_as_even_as_can_be():
    for cols, widths in ((19, [5, 5, 5, 4]), (18, [6, 6, 6]), (5, [5])):
        spec = Shape(3, cols, 8, 16, gaps=True).spec("fp32", EpilogueProgram(), residual=False)
        assert kernel_of(spec).widths(Tile(1, 6, 2)) == widths


def test_the_text_of_a_kernel_names_its_loops():
    spec = SHAPES["3x3"].spec("int8", EpilogueProgram(), residual=False)
    module = Module()
    kernel_of(spec).emit(module, "kernel", AVX512_VNNI, Tile(1, 14, 2))
    comments = [line.strip() for line in module.text().splitlines() if line.strip().startswith("; for")]
    loops = ["item", "block", "panel", "tile row", "tap row", "k"]
    assert [comment.split(" in ")[0] for comment in comments] == [f"; for {loop}" for loop in loops]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("residual, allowed", [(False, 0), (True, 4)])
def test_tiles_of_floats_hardly_spill_on_a_machine_of_32_registers(precision, residual, allowed):
    """Nothing spills in the K loop or where constants are added; five spill in a residual's program with 28 sums."""
    spec, _, _ = problem(Shape(1, 196, 64, 128), precision, residual=residual)
    for tactic in kernel_of(spec).tactics(AVX512_BF16):
        module = Module()
        kernel_of(spec).emit(module, "kernel", AVX512_BF16, tactic)
        assert spills(assembly(module.text(), AVX512_BF16)) <= allowed, tactic
