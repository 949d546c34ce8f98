"""Contractions by tile registers: every tactic, exact in INT8; their instructions and configurations."""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX512_AMX, AVX512_AMX_FP16, AVX512_BF16, AVX512_VNNI, Isa
from infer_server.engines.backends.llvm.codegen.tiles import (
    AMX,
    AMX_FP16,
    Tiles,
    configuration,
    meanings,
    product_of_bytes,
)
from infer_server.engines.backends.llvm.kernels.contraction.direct import DirectContraction
from infer_server.engines.backends.llvm.kernels.kernel import kernels_for
from infer_server.engines.backends.llvm.kernels.matrix_unit.contraction import AmxTile, MatrixUnitContraction
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.codegen.types import I64, PTR
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from scripts.testing.suite import check, random_array, run
from tests.engines.backends.llvm.emulation import EMULATION
from tests.engines.backends.llvm.jit import LoadedKernel, assembly, runs_here, spills
from tests.engines.backends.llvm.runner import CpuRunner, DynamicRunner
from tests.engines.backends.runners import ALL_COMBINATIONS
from tests.engines.backends.test_contraction import SHAPES, TOLERANCE, Shape, problem

CPU = CpuRunner(AVX512_AMX)
FLOATS = {"bf16": AVX512_AMX, "fp16": AVX512_AMX_FP16}
LAYERS = {
    "3x3, 14 pixels a row": Shape(14, 14, 64, 64, taps=(3, 3)),
    "3x3, 7 pixels a row": Shape(7, 7, 64, 32, taps=(3, 3)),
    "3x3, stride 2": Shape(7, 7, 48, 96, taps=(3, 3), stride=(2, 2)),
    "3x3, dilated": Shape(7, 17, 64, 32, taps=(3, 3), dilation=(2, 2)),
    "3x3, stride and dilation in gaps": Shape(4, 9, 32, 16, taps=(3, 2), stride=(1, 2), dilation=(3, 2), gaps=True),
    "3x3, 9 channels, odd runs": Shape(6, 20, 9, 32, taps=(3, 3), stride=(2, 2)),
    "1x1, 49 pixels": Shape(7, 7, 160, 64),
    "1x1, 35 pixels in gaps": Shape(5, 7, 64, 32, gaps=True),
    "1x1, stride 2": Shape(7, 7, 128, 64, stride=(2, 2)),
    "1x1, a long run": Shape(1, 37, 1000, 33),
    "a run of 65 bytes": Shape(1, 33, 65, 70),
    "a run of 67 bytes, odd couts": Shape(3, 5, 67, 5),
    "a narrow last panel": Shape(3, 56, 64, 72, taps=(3, 3)),
    "groups that fill registers": Shape(4, 20, 128, 64, taps=(3, 3), groups=2),
}
EVERY_LAYER = pytest.mark.parametrize("name", [*SHAPES, *LAYERS])
NATIVE = pytest.mark.parametrize("native", [
    False, pytest.param(True, marks=pytest.mark.skipif(not runs_here(AVX512_AMX), reason="no tile registers here"))])


def kernel_of(name: str, precision: str, residual: bool = True):
    spec, inputs, constants = problem({**SHAPES, **LAYERS}[name], precision, residual=residual)
    return MatrixUnitContraction(spec).for_batches_of(2), inputs, constants


@EVERY_LAYER
def test_every_tactic_of_bytes_equals_the_reference_bit_for_bit(name: str) -> None:
    kernel, inputs, constants = kernel_of(name, "int8")
    assert kernel.tactics(AVX512_AMX)
    tactics = [*enumerate(kernel.tactics(AVX512_AMX))]
    if not ALL_COMBINATIONS:        # half of them for each layer, in turn
        tactics = tactics[[*LAYERS].index(name) % 2::2] if name in LAYERS else tactics[::3]
    for number, tactic in tactics:
        tactic = replace(tactic, block=number % 3, prefetch=number % 2 == 1)
        check(kernel, CPU, inputs, constants, tactic=tactic, pieces=2, slack=3)


@EVERY_LAYER
@pytest.mark.parametrize("precision", FLOATS)
def test_tactics_of_16_bit_floats_agree_with_the_reference(name: str, precision: str) -> None:
    """Test every second tactic of BF16, and every fourth of FP16: INT8 has all, and they differ in elements only."""
    kernel, inputs, constants = kernel_of(name, precision)
    constants["weights"] = constants["weights"] / 4
    isa = FLOATS[precision]
    assert bool(kernel.tactics(isa)) == (kernel.depth >= (16 if kernel.run_bytes <= 64 else 32))
    step = (1 if name in LAYERS else 3) * (4 if precision == "fp16" else 2)
    for tactic in kernel.tactics(isa)[::step]:
        check(kernel, CpuRunner(isa), inputs, constants, TOLERANCE[precision], tactic=tactic, pieces=2, slack=0)


@pytest.mark.parametrize("precision", ["int8", *FLOATS])
@pytest.mark.parametrize("name", ["3x3, 7 pixels a row", "1x1, a long run", "a run of 65 bytes"])
def test_emulated_tile_registers_give_what_the_machine_gives(name: str, precision: str) -> None:
    kernel, inputs, constants = kernel_of(name, precision)
    isa = FLOATS.get(precision, AVX512_AMX)
    cpu = CpuRunner(isa)
    for tactic in kernel.tactics(isa)[:2]:
        emulated, = run(kernel, cpu, inputs, constants, tactic=tactic, slack=3, native=False)
        if runs_here(isa):
            np.testing.assert_array_equal(emulated, run(kernel, cpu, inputs, constants, tactic=tactic, slack=3)[0])
        if precision == "int8":
            np.testing.assert_array_equal(emulated, kernel.problem.reference(inputs, constants)[0])


@EVERY_LAYER
def test_kernels_that_read_their_extents_at_run_time_equal_the_reference(name: str) -> None:
    kernel, inputs, constants = kernel_of(name, "int8")
    check(kernel, DynamicRunner(AVX512_AMX), inputs, constants, pieces=2, slack=3)


@pytest.mark.parametrize("name", ["3x3, 7 pixels a row", "1x1, 49 pixels", "a narrow last panel"])
def test_a_panel_of_weights_meets_several_items(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_server.engines.backends.llvm.kernels.matrix_unit.contraction.FAR_WEIGHTS", 0)
    kernel, inputs, constants = kernel_of(name, "int8")
    monkeypatch.setattr("infer_server.engines.backends.llvm.kernels.matrix_unit.contraction.TOGETHER_BYTES",
                        2 * int(np.prod(kernel.problem.x.shape)))
    assert kernel.items_together == 2
    more = [np.concatenate([array, array[::-1], array[:1]]) for array in inputs]
    for tactic in kernel.tactics(AVX512_AMX)[:2]:
        tactic = replace(tactic, prefetch=True)     # compiled by no other test
        for pieces in (1, 3):
            check(kernel, CPU, more, constants, tactic=tactic, pieces=pieces, slack=3)
        assert {one.block for one in kernel.refinements(AVX512_AMX, tactic)} == {0}


def test_images_of_few_columns_have_tiles_of_whole_rows_in_one_run() -> None:
    kernel, inputs, constants = kernel_of("3x3, 7 pixels a row", "int8")
    wide = AmxTile(7, 7, 1)
    assert wide in kernel.tactics(AVX512_AMX) and kernel.wide == 9
    assert [places for _, _, places in kernel.cut(7, 7).runs] == [16] * 4       # 6 * 9 + 7 places
    check(kernel, DynamicRunner(AVX512_AMX), inputs, constants, tactic=wide, pieces=2, slack=3)
    strided, _, _ = kernel_of("3x3, stride 2", "int8")
    assert strided.wide == 0 and all(runs(strided, tile.rows, tile.cols) == tile.rows * runs(strided, 1, tile.cols)
                                     for tile in strided.tactics(AVX512_AMX))


def test_rows_have_runs_of_their_own_where_one_run_takes_longer() -> None:
    kernel, _, _ = kernel_of("3x3, 14 pixels a row", "int8")
    assert kernel.wide == 16 and [places for _, _, places in kernel.cut(2, 14).runs] == [14, 14]       # not 15 and 15


def runs(kernel: MatrixUnitContraction, rows: int, cols: int) -> int:
    return len(kernel.cut(rows, cols).runs)


@pytest.mark.parametrize("name", ["3x3, 7 pixels a row", "1x1, 49 pixels"])
def test_sums_may_be_stored_as_floats(name: str) -> None:
    spec = LAYERS[name].spec("int8", EpilogueProgram(), "float32", residual=False)
    random = np.random.default_rng(3)
    x = random_array(random, "uint8", (2, *spec.x.shape))
    weights = random_array(random, "int8", (spec.cout, spec.cin, *spec.taps))
    check(MatrixUnitContraction(spec), CPU, [x], {"weights": weights, "program": []}, slack=3)


@pytest.mark.parametrize("precision, infinity", [("bf16", 0x7F80), ("fp16", 0x7C00)])
def test_blocks_of_floats_do_not_read_behind_their_run(precision: str, infinity: int) -> None:
    """An infinity behind the run times a zero weight would be NaN."""
    spec, (x, *others), constants = problem(Shape(1, 20, 80, 32, groups=2), precision, stored="float32")
    kernel, cpu = MatrixUnitContraction(spec), CpuRunner(FLOATS[precision])
    expected, = run(kernel, cpu, [x, *others], constants)
    x.view(np.uint16)[..., 40] = infinity
    got, = run(kernel, cpu, [x, *others], constants)
    np.testing.assert_array_equal(got[..., :16], expected[..., :16])
    assert (got[..., 16:] != expected[..., 16:]).any()


@pytest.mark.parametrize("isa", [AVX512_BF16, AVX512_VNNI])
def test_cpus_without_a_matrix_unit_have_no_such_tactics(isa: Isa) -> None:
    spec, _, _ = problem(LAYERS["1x1, 49 pixels"], "int8")
    assert not MatrixUnitContraction(spec).tactics(isa)


@pytest.mark.parametrize("precision, weights", [("fp32", ""), ("fp16", ""), ("fp32", "int8"), ("bf16", "int8")])
def test_other_arithmetics_are_left_to_vectors(precision: str, weights: str) -> None:
    spec, _, _ = problem(LAYERS["1x1, 49 pixels"], precision)
    assert not MatrixUnitContraction(replace(spec, weights=weights)).tactics(AVX512_AMX)


def test_vectors_and_tiles_are_both_offered_and_tiles_cost_less_where_k_is_long() -> None:
    spec, _, _ = problem(LAYERS["3x3, 14 pixels a row"], "int8")
    costs = {type(kernel): min(kernel.cost(AVX512_AMX, tactic) for tactic in kernel.tactics(AVX512_AMX))
             for kernel in kernels_for(spec) if kernel.tactics(AVX512_AMX)}
    assert costs[MatrixUnitContraction] < 0.5 * costs[DirectContraction]


# ---- code
def assembly_of(shape: Shape, tactic: AmxTile | None = None, residual: bool = True, precision: str = "int8") -> str:
    kernel = MatrixUnitContraction(problem(shape, precision, residual=residual)[0])
    module, isa = Module(), FLOATS.get(precision, AVX512_AMX)
    kernel.emit(module, "kernel", isa, tactic or kernel.tactics(isa)[0])
    return assembly(module.text(), isa)


def test_halves_are_multiplied_by_tiles_where_the_cpu_can() -> None:
    text = assembly_of(Shape(1, 64, 256, 64), precision="fp16")
    assert "\ttdpfp16ps" in text and "\tvcvtps2ph" in text
    spec, _, _ = problem(Shape(1, 64, 256, 64), "fp16")
    assert not MatrixUnitContraction(spec).tactics(AVX512_AMX)
    best = min(((kernel, tactic) for kernel in kernels_for(spec) for tactic in kernel.tactics(AVX512_AMX_FP16)),
               key=lambda one: one[0].cost(AVX512_AMX_FP16, one[1]))
    assert isinstance(best[0], MatrixUnitContraction)


@pytest.mark.parametrize("precision", ["int8", *FLOATS])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [Shape(1, 64, 256, 64), Shape(14, 14, 64, 64, taps=(3, 3)), Shape(1, 64, 64, 64)])
def test_no_micro_kernel_spills_vectors(shape: Shape, residual: bool, precision: str) -> None:
    spec, _, _ = problem(shape, precision, residual=residual)
    for tactic in MatrixUnitContraction(spec).tactics(FLOATS.get(precision, AVX512_AMX))[::2]:
        text = assembly_of(shape, tactic, residual, precision)
        assert spills(text[text.index("\ntile_"):]) == 0, tactic


def test_the_epilogue_of_a_tile_is_spread_among_the_products_of_the_next() -> None:
    text = assembly_of(Shape(1, 64, 256, 64), AmxTile(1, 32, 2))
    letters = {"tdpbusd": "d", "vpackuswb": "p", "tilestored": "s", "retq": "."}
    words = (line.split()[0] for line in text[text.index("1x32x32:\n"):].splitlines() if line.startswith("\t"))
    order = "".join(letters.get(word, "") for word in words)
    woven = order[order.index("sdsdsdsd") + 8:order.index(".")]         # three blocks of K are left for the epilogue
    assert woven.count("d") == 12 and woven.count("p") == 16 and max(map(len, woven.split("d"))) <= 2


def test_a_tile_of_32_pixels_by_32_couts_loads_a_register_for_each_product() -> None:
    text = assembly_of(Shape(1, 64, 256, 64), AmxTile(1, 32, 2))
    counts = Counter(line.split()[0] for line in text.splitlines() if line.startswith(("\ttile", "\ttdp", "\tldtile")))
    assert counts["tdpbusd"] == counts["tileloadd"] and counts["tilestored"] == 4 * 2      # woven, and of the last tile
    assert counts["ldtilecfg"] == counts["tilerelease"] == 1


def test_weights_are_asked_for_ahead_a_line_at_a_time() -> None:
    shape, tile = Shape(1, 64, 256, 64), AmxTile(1, 32, 2)
    assert "prefetcht" not in assembly_of(shape, tile)
    text = assembly_of(shape, replace(tile, prefetch=True))
    lines = re.findall(r"prefetcht1\s+(\d+)\(", text)
    assert len(lines) == 8 * text.count("\ttdpbusd") and {int(at) % 64 for at in lines} == {0}


# ---- instructions
def run_on_tiles(write, *arrays: np.ndarray, native: bool) -> None:
    """Run what `write(tiles, addresses)` emits, on the arrays."""
    module = Module(None if native else EMULATION)
    f = module.function("kernel", operands=PTR, a=I64, b=I64, c=I64, d=I64)
    addresses = [f.load(PTR, f.parameters["operands"] + 8 * i) for i in range(len(arrays))]
    write(Tiles(f), addresses)
    LoadedKernel(module.text(), "kernel", AVX512_AMX_FP16, emulate=not native)(arrays, (0, 1))


def product(instruction: str, c: np.ndarray, a: np.ndarray, b: np.ndarray, native: bool) -> None:
    def write(tiles, at):
        tiles.configure({0: (16, 64), 1: (16, 64), 2: (16, 64)})
        for register in range(3):
            tiles.load(register, at[register], 64)
        tiles.multiply(instruction, 0, 1, 2)
        tiles.store(0, at[0], 64)
        tiles.release()
    run_on_tiles(write, c, a, b, native=native)


@NATIVE
@pytest.mark.parametrize("left, right", [(np.uint8, np.int8), (np.int8, np.int8), (np.int8, np.uint8),
                                         (np.uint8, np.uint8)])
def test_products_of_bytes_are_exact_and_wrap(left: type, right: type, native: bool) -> None:
    random = np.random.default_rng(0)
    a, b = (random.integers(0, 256, (16, 64)).astype(np.uint8).view(dtype) for dtype in (left, right))
    c = random.integers(-1 << 31, 1 << 31, (16, 16)).astype(np.int32)
    c[0] = (1 << 31) - 1
    columns = b.reshape(16, 16, 4).transpose(0, 2, 1).reshape(64, 16)
    expected = (c.astype(np.int64) + a.astype(np.int64) @ columns.astype(np.int64)).astype(np.int32)
    product(product_of_bytes(left is np.int8, right is np.int8), c, a, b, native)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("instruction, dtype, specials, native", [
    pytest.param(instruction, dtype, specials, native, marks=pytest.mark.skipif(
        native and not runs_here(isa), reason="no such tile registers here"))
    for instruction, dtype, specials, isa in [
        ("tdpbf16ps", ml_dtypes.bfloat16, [1e-39, -1e-39, 3e38, np.inf], AVX512_AMX),
        ("tdpfp16ps", np.float16, [6e-8, -6e-8, 6e4, np.inf], AVX512_AMX_FP16)] for native in (False, True)])
def test_products_of_floats_sum_even_and_odd_elements_apart_and_denormal_sums_are_zero(
        instruction: str, dtype: type, specials: list[float], native: bool) -> None:
    """Denormals of bfloat16 are read as zeros, those of halves count."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((16, 32)).astype(dtype) for _ in range(2))
    a[0, :4] = specials
    c = random.standard_normal((16, 16)).astype(np.float32)
    c[0, 0] = 1e-40
    a[1], c[1] = 0, 1e-40               # sums of which nothing is left
    x, w = (flushed(values.astype(np.float32)) for values in (a, b))
    halves = [np.zeros_like(c), np.zeros_like(c)]
    with np.errstate(over="ignore", invalid="ignore"):
        for k, e in np.ndindex(16, 2):
            products = x[:, 2 * k + e].astype(np.float64)[:, None] * w[k, e::2].astype(np.float64)
            halves[e] = flushed((halves[e] + products).astype(np.float32))
        expected = flushed(flushed(c) + flushed(halves[0] + halves[1]))
    product(instruction, c, a, b, native)
    np.testing.assert_array_equal(c, expected)
    assert not c[1].any() and (a[0, 0].astype(np.float32) == x[0, 0]) == (dtype is np.float16)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0 ** -126), np.copysign(np.float32(0), x), x)


@NATIVE
def test_rows_that_are_not_configured_are_neither_read_nor_written(native: bool) -> None:
    source, target = np.arange(1024, dtype=np.uint8).reshape(16, 64), np.full((16, 64), 7, np.uint8)

    def write(tiles, at):
        tiles.configure({3: (5, 24)})
        tiles.load(3, at[0], 64)
        tiles.store(3, at[1], 64)
        tiles.release()
    run_on_tiles(write, source, target, native=native)
    np.testing.assert_array_equal(target[:5, :24], source[:5, :24])
    assert (target[5:] == 7).all() and (target[:, 24:] == 7).all()


def test_a_configuration_is_64_bytes_of_palette_1() -> None:
    memory = configuration(AMX, {0: (16, 64), 6: (12, 48)})
    assert len(memory) == 64 and memory[0] == 1
    assert (memory[16], memory[28], memory[48], memory[54]) == (64, 48, 16, 12) and sum(memory) == 1 + 64 + 48 + 16 + 12


def test_every_instruction_that_kernels_emit_has_a_meaning() -> None:
    products = {f"llvm.x86.{instruction}" for _, instruction in AMX_FP16.products}
    assert set(AMX.products) < set(AMX_FP16.products)
    products |= {f"llvm.x86.{product_of_bytes(left, right)}" for left in (False, True) for right in (False, True)}
    assert products <= meanings(0).keys() <= EMULATION.keys()


def test_a_wrong_sign_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, inputs, constants = kernel_of("1x1, 49 pixels", "int8")
    monkeypatch.setattr("tests.engines.backends.llvm.runner.EMULATION",
                        EMULATION | {"llvm.x86.tdpbusd": EMULATION["llvm.x86.tdpbusd"].replace("sext", "zext")})
    tactic = AmxTile(1, 16, 1, block=9)         # compiled by no other test
    with pytest.raises(AssertionError):
        check(kernel, CPU, inputs, constants, tactic=tactic, slack=3, native=False)
