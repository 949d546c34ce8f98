from dataclasses import replace

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import ALL, AVX2, AVX512_BF16, AVX512_VNNI
from infer_server.engines.backends.llvm.kernels.depthwise.depthwise import DepthwiseTile
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.problems.convolution import Depthwise
from infer_server.engines.lowering.problems.view import View, dense_view
from scripts.testing.suite import check, gapped, random_array, requantise, run
from tests.engines.backends.llvm.jit import assembly, spills
from tests.engines.backends.llvm.runner import CpuRunner, kernel_of
from tests.engines.backends.runners import ALL_COMBINATIONS, EVERY_BACKEND, EVERY_ISA_WIDTH, EVERY_WIDTH, ISA_WIDTHS

BATCH = 2
DTYPES = {"int8": "uint8", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def depthwise(channels, taps, stride=(1, 1), dilation=(1, 1), outputs=(5, 9), precision="int8", target=None,
              residual=True):
    """Return the spec and its constants, with weights over the whole range of int8."""
    random = np.random.default_rng(channels)
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(outputs, stride, taps, dilation, strict=True)]
    scale = 40 / (128 * 73 * np.sqrt(np.prod(taps))) if precision == "int8" else 40
    program, constants = requantise(channels, random, scale, residual)
    dtype = DTYPES[precision]
    y = gapped(target or dtype, (*outputs, channels))
    operands = (dense_view(dtype, y.shape),) * residual
    shape = (channels, 1, *taps)
    if precision == "int8":
        constants["weights"] = random.integers(-128, 128, shape).astype(np.int8)
    else:
        constants["weights"] = random.standard_normal(shape).astype(np.float32)
    spec = Depthwise(gapped(dtype, (*reach, channels)), y, operands, program, precision, taps, stride, dilation)
    return spec, constants


def data(spec):
    random = np.random.default_rng(0)
    return [random_array(random, view.dtype, (BATCH, *view.shape)) for view in spec.inputs]


@EVERY_BACKEND
@pytest.mark.parametrize("channels", [1, 3, 17, 33, 116])
def test_3x3_of_any_number_of_channels(channels, runner):
    spec, constants = depthwise(channels, (3, 3), outputs=(3, 5))
    check(spec, runner, data(spec), constants, pieces=2)


@EVERY_ISA_WIDTH
def test_an_operand_may_be_one_number_for_all_channels(cpu):
    spec, constants = depthwise(40, (3, 3), outputs=(2, 3))
    spec = replace(spec, operands=(View("uint8", spec.y.shape, (0, 0, 0), 1),))
    x, one = data(spec)
    check(spec, cpu, [x, np.broadcast_to(one[:, :1, :1, :1], one.shape)], constants, tactic=DepthwiseTile(1, 3, 1))


@EVERY_WIDTH
@pytest.mark.parametrize("taps, stride, dilation", [
    ((3, 3), (2, 2), (1, 1)), ((5, 5), (1, 1), (1, 1)), ((5, 3), (2, 1), (1, 1)), ((3, 3), (1, 1), (2, 2)),
    ((7, 7), (1, 1), (1, 1)), ((1, 4), (1, 2), (1, 1)), ((4, 1), (1, 1), (1, 1)), ((3, 7), (1, 1), (1, 3)),
    ((1, 9), (1, 1), (1, 2)), ((2, 2), (3, 3), (1, 1)), ((13, 7), (1, 1), (1, 1))])
def test_any_window(taps, stride, dilation, runner):
    spec, constants = depthwise(10, taps, stride, dilation, outputs=(3, 3))
    check(spec, runner, data(spec), constants, pieces=2)


@EVERY_ISA_WIDTH
@pytest.mark.parametrize("precision, target", [("int8", "uint8"), ("fp32", "float32"), ("fp16", "float16")])
def test_the_code_of_a_large_window_is_bounded_and_right(precision, target, cpu):
    spec, constants = depthwise(24, (13, 31), (2, 1), outputs=(3, 8), precision=precision, target=target)
    kernel = kernel_of(spec)
    for tactic in kernel.tactics(cpu.isa):
        check(spec, cpu, data(spec), constants, tactic=tactic)
        module = Module()
        kernel.emit(module, "kernel", cpu.isa, tactic)
        assert len(module.text().splitlines()) < 40_000


@EVERY_ISA_WIDTH
@pytest.mark.parametrize("taps, stride, residual", [((3, 3), 1, True), ((3, 3), 2, False), ((5, 5), 1, False),
                                                    ((2, 6), 1, False)])
def test_every_tactic_is_the_same_function(taps, stride, residual, cpu):
    spec, constants = depthwise(80, taps, (stride, stride), outputs=(3, 5), residual=residual)
    tactics = (kernel_of(spec).tactics(cpu.isa)[-1], DepthwiseTile(1, 4, 2), DepthwiseTile(2, 3, 1),
               DepthwiseTile(2, 4, 4))
    number = ISA_WIDTHS.index(cpu) + sum(taps) // 2 + stride
    for tactic in tactics[number % 2::1 if ALL_COMBINATIONS else 2]:
        check(spec, cpu, data(spec), constants, tactic=tactic)


@EVERY_ISA_WIDTH
@pytest.mark.parametrize("stride, dilation", [((1, 1), (1, 1)), ((2, 1), (1, 2))])
@pytest.mark.parametrize("target", ["float32", "uint8"])
def test_every_tactic_of_float32_adds_in_the_order_of_the_reference(stride, dilation, target, cpu):
    spec, constants = depthwise(40, (3, 2), stride, dilation, outputs=(3, 31), precision="fp32", target=target)
    by_tap = [tactic for tactic in kernel_of(spec).tactics(cpu.isa) if tactic.by_tap]
    assert len(by_tap) >= 2
    for tactic in by_tap:
        check(spec, cpu, data(spec), constants, tactic=tactic)


def test_two_vectors_of_one_row_cost_less_than_one_vector_of_two_rows():
    """A single vector uses only half of an interleaved pair."""
    kernel = kernel_of(depthwise(128, (5, 5), outputs=(14, 28), residual=False)[0])
    assert kernel.cost(AVX2, DepthwiseTile(1, 14, 2)) < kernel.cost(AVX2, DepthwiseTile(2, 14, 1))


@EVERY_ISA_WIDTH
def test_tactics_of_one_packing_share_their_constants(cpu):
    spec, constants = depthwise(40, (3, 3))
    packed = {}
    for tactic in kernel_of(spec).tactics(cpu.isa):
        arrays = [array.tobytes() for array in kernel_of(spec).pack(cpu.isa, tactic, constants)]
        assert packed.setdefault(kernel_of(spec).packing(tactic), arrays) == arrays
    assert len(packed) >= 2


@EVERY_WIDTH
@pytest.mark.parametrize("precision, target", [
    ("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("int8", "float32"), ("fp32", "uint8")])
def test_floats_are_added_in_the_order_of_the_reference(precision, target, runner):
    for taps in ((3, 3), (2, 41))[:1 if precision in ("bf16", "fp16") else 2]:      # which unroll both
        spec, constants = depthwise(24, taps, outputs=(3, 5), precision=precision, target=target)
        check(spec, runner, data(spec), constants)


@pytest.mark.parametrize("isa, tile", [(AVX512_VNNI, DepthwiseTile(2, 7, 4)), (AVX2, DepthwiseTile(1, 7, 2))])
def test_the_accumulators_of_3x3_stay_in_registers(isa, tile):
    spec, _ = depthwise(128, (3, 3), outputs=(14, 14), residual=False)
    module = Module()
    kernel_of(spec).emit(module, "kernel", isa, tile)
    assert spills(assembly(module.text(), isa)) == 0


def test_no_usual_tactic_spills_on_a_machine_of_32_registers():
    for precision in ("fp32", "bf16", "fp16", "int8"):
        for taps, stride in (((3, 3), (1, 1)), ((3, 3), (2, 2)), ((5, 5), (1, 1))):
            spec, _ = depthwise(128, taps, stride, outputs=(14, 28), residual=False, precision=precision)
            tactics = kernel_of(spec).tactics(AVX512_BF16)
            # A tile of fewer columns is the beginning of a wider one.
            widest = {(tile.rows, tile.vectors, tile.by_tap): tile for tile in sorted(tactics, key=lambda t: t.cols)}
            for tactic in tactics if ALL_COMBINATIONS else widest.values():
                module = Module()
                kernel_of(spec).emit(module, "kernel", AVX512_BF16, tactic)
                assert spills(assembly(module.text(), AVX512_BF16)) == 0, (precision, taps, stride, tactic)


def test_extreme_products_do_not_saturate():
    spec, constants = depthwise(16, (3, 3), residual=False)
    inputs = [np.full_like(x, 255) for x in data(spec)]
    for sign in (-128, 127):
        constants["weights"][:] = sign
        for isa in ALL:
            check(spec, CpuRunner(isa), inputs, constants)


def test_a_wrong_weight_is_caught():
    spec, constants = depthwise(16, (3, 3))
    got, = run(spec, CpuRunner(AVX2), data(spec), constants, native=False)
    constants["weights"][3, 0, 2, 2] ^= 64
    wrong, = spec.reference(data(spec), constants)
    assert (got != wrong).any(axis=(0, 1, 2)).tolist() == [channel == 3 for channel in range(16)]
