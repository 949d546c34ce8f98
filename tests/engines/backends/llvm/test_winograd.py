"""Winograd's convolution: exact for INT8 on every instruction set that has it, whatever the cut and the tail."""
from dataclasses import replace

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import ALL, AVX2, AVX512_VNNI
from infer_server.engines.backends.llvm.kernels.contraction.panels import cout_panels
from infer_server.engines.backends.llvm.kernels.winograd.tiling import SCALE, transform_input, transform_output
from infer_server.engines.backends.llvm.kernels.winograd.weights import WinogradWeights, transform_weights
from infer_server.engines.backends.llvm.kernels.winograd.winograd import WinogradContraction
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.view import dense_view
from infer_server.engines.lowering.rules.contraction import bounded
from scripts.testing.suite import check, gapped, random_array, requantise
from tests.engines.backends.llvm.runner import CpuRunner

BATCH = 3
SHAPES = {"whole tiles": (8, 8, 32, 32), "tails both ways": (7, 9, 16, 40), "one small tile": (3, 2, 16, 8),
          "narrow couts": (5, 8, 48, 5), "volumes": (5, 6, 16, 24, 3)}
WINOGRAD_ISAS = pytest.mark.parametrize("isa", [isa for isa in ALL if isa.winograd_tiles], ids=lambda isa: isa.name)
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def problem(shape, precision, view=dense_view, residual=True):
    rows, cols, cin, cout, *planes = shape
    random = np.random.default_rng(0)
    program, constants = requantise(cout, random, (0.005 if precision == "int8" else 10) / (9 * cin)**0.5, residual)
    ones = (1,) * (2 + len(planes))
    stored = {"int8": "uint8", "fp32": "float32"}[precision]
    y = view(stored, (*planes, rows, cols, cout))
    taps = (*(2 for _ in planes), 3, 3)
    reach = (n + t - 1 for n, t in zip((*planes, rows, cols), taps, strict=True))
    spec = Contraction(view(stored, (*reach, cin)), y, (y,) * residual, program, precision, taps, ones, ones,
                       bounded=True)
    weights = random_array(random, "int8" if precision == "int8" else "float32", (cout, cin, *taps))
    inputs = [random_array(random, v.dtype, (BATCH, *v.shape)) for v in spec.inputs]
    return spec, inputs, {"weights": weights, **constants}


@WINOGRAD_ISAS
@EVERY_SHAPE
def test_int8_equals_the_reference_bit_for_bit(shape, isa):
    spec, inputs, constants = problem(shape, "int8", gapped)
    if spec.cin % isa.lanes:
        pytest.skip("not this many channels")
    assert spec.reference(inputs, constants)[0].std() > 10
    kernel = WinogradContraction(spec)
    first, *others = kernel.tactics(isa)
    for tactic in (first, *others[:1], *kernel.refinements(isa, first)):
        check(kernel, CpuRunner(isa), inputs, constants, tactic=tactic, pieces=2)


@WINOGRAD_ISAS
@EVERY_SHAPE
def test_float32_agrees_with_the_reference(shape, isa):
    """Bytes between the rows of x are arbitrary: as floats they may be infinite, and must not enter a patch."""
    spec, inputs, constants = problem(shape, "fp32", gapped)
    check(WinogradContraction(spec), CpuRunner(isa), inputs, constants, 1e-4, pieces=2)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_bytes_and_weights_are_exact(sign):
    """All products are at their limits, so that an overflow of int16 would show."""
    spec, inputs, constants = problem((4, 4, 112, 8), "int8", residual=False)
    inputs = [np.full_like(x, 255) for x in inputs]
    constants = {"program": [np.float32(1 / 255 / 128 / 1008 * 255)[None], *constants["program"][1:]],
                 "weights": np.full_like(constants["weights"], 127 if sign > 0 else -128)}
    for pattern in (slice(None), slice(None, None, 2)):
        inputs[0][:, pattern, ::2] = 0
        check(WinogradContraction(spec), CpuRunner(AVX2), inputs, constants)


def test_other_convolutions_have_no_such_tactic():
    spec, _, _ = problem((8, 8, 32, 32), "int8")
    assert WinogradContraction(spec).tactics(AVX2)
    others = (dict(bounded=False), dict(stride=(2, 2)), dict(dilation=(2, 1)), dict(taps=(3, 1)), dict(groups=2),
              dict(precision="bf16"),
              dict(x=dense_view("uint8", (10, 10, 1024)), y=dense_view("uint8", (8, 8, 1024)), operands=()))
    assert not any(WinogradContraction(replace(spec, **other)).tactics(AVX2) for other in others)


@pytest.mark.parametrize("channels, asked", [(16, [False]), (64, [False, True]), (128, [True])])
def test_weights_are_asked_for_ahead_the_sooner_the_more_there_are(channels, asked):
    """Prefetch is never used for 18 KB of weights, tried for 295 KB, and always used for 1.2 MB."""
    spec, _, _ = problem((8, 8, channels, channels), "int8")
    kernel = WinogradContraction(spec)
    first = kernel.tactics(AVX2)[0]
    assert sorted({tactic.prefetch for tactic in (first, *kernel.refinements(AVX2, first))}) == asked
    for prefetch in asked:
        module = Module()
        kernel.emit(module, "kernel", AVX2, replace(first, prefetch=prefetch))
        assert ("llvm.prefetch" in module.text()) == prefetch


@pytest.mark.parametrize("channels, fits", [(114, True), (115, False)])
def test_the_bound_on_sums_is_known_from_the_weights(channels, fits):
    """A sum within the bound is restored from 32 bits after the scales took 6 of them."""
    weights = np.full((2, channels, 3, 3), -128, np.int8)
    weights[0] = 0
    assert bounded(weights) == (255 * 128 * 9 * channels < 1 << 25) == fits


def test_the_transforms_make_a_convolution():
    def both_ways(transform, tile, *how):
        return np.array(transform(np.array(transform(tile, *how)).T, *how)).T

    def plus(a, n, b):
        return a * n + b

    random = np.random.default_rng(0)
    x, w = random.integers(0, 256, (6, 6)), random.integers(-128, 128, (3, 3))
    expected = [[(x[i:i + 3, j:j + 3] * w).sum() for j in range(4)] for i in range(4)]
    products = both_ways(transform_input, x, plus) * both_ways(transform_weights, w)
    np.testing.assert_array_equal(both_ways(transform_output, products, plus), np.array(expected) * SCALE)


# ---- weights made when a plan is loaded
G = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 6]])


@WINOGRAD_ISAS
@EVERY_SHAPE
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_the_kernel_that_makes_the_weights_equals_its_meaning_bit_for_bit(shape, precision, isa):
    spec, _, constants = problem(shape, precision)
    if spec.cin % isa.lanes:
        pytest.skip("not this many channels")
    kernel = WinogradContraction(spec)
    for tactic in kernel.tactics(isa):
        kept, made = kernel.pack(isa, tactic, constants)[0], kernel.expansions(isa, tactic)[0]
        assert isinstance(made, WinogradWeights) and kept.shape == made.inputs[0].shape
        assert kept.dtype == constants["weights"].dtype
        check(made, CpuRunner(isa), [kept[None]], {}, pieces=3)


@pytest.mark.parametrize("isa", [AVX2, AVX512_VNNI], ids=lambda isa: isa.name)
def test_made_weights_are_those_of_the_paper(isa):
    """Expanded weights are G g G' for every output channel, in the kernel's panel order."""
    spec, _, constants = problem((8, 8, 32, 40), "int8")
    kernel = WinogradContraction(spec)
    tactic = kernel.tactics(isa)[0]
    made = kernel.expanded_constants(isa, tactic, constants)[0]
    expected = np.einsum("ip,ocpq,jq->oijc", G, constants["weights"].astype(int), G).reshape(40, 36, -1, 2)
    at = 0
    for order in cout_panels(spec, isa, tactic.vectors):
        size = 36 * spec.cin * order.size
        panel = made[at:at + size].reshape(36, -1, *order.shape, 2)
        for where in np.argwhere(order < 40):
            np.testing.assert_array_equal(panel[:, :, *where], expected[order[*where]])
        at += size
    assert at == len(made)
