"""The definitions of machine instructions against numpy, and against the machine where it has them."""
import ml_dtypes
import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX2, AVX512_AMX, PORTABLE
from infer_server.engines.backends.llvm.kernels.matrix_unit.softmax import Scaling
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.codegen.types import I64, PTR
from infer_server.engines.lowering.epilogue.program import NUMPY
from scripts.testing.suite import random_array
from tests.engines.backends.llvm.emulation import EMULATION
from tests.engines.backends.llvm.jit import LoadedKernel, assembly, runs_here, spills


def call(name, types, result, operands, native=False):
    """Return the intrinsic's result for the operands (arrays of bytes)."""
    module = Module(None if native else EMULATION)
    f = module.function("kernel", operands=PTR, a=I64, b=I64, c=I64, d=I64)
    addresses = [f.load(PTR, f.parameters["operands"] + 8 * i) for i in range(len(types) + 1)]
    arguments = [f.load(type_, address) for type_, address in zip(types, addresses, strict=False)]
    f.store(f.call(result, name, *arguments), addresses[-1])
    out = np.zeros(64, np.uint8)
    LoadedKernel(module.text(), "kernel", AVX2 if native else PORTABLE, emulate=not native)([*operands, out], (0, 1))
    return out


def bytes_of(seed, dtype, count):
    random, info = np.random.default_rng(seed), np.iinfo(dtype)
    values = random.integers(info.min, info.max + 1, count).astype(dtype)
    values[:8] = [info.min, info.min, info.max, info.max] * 2      # where saturation and wrapping show
    return values


@pytest.mark.parametrize("name, lanes, dtype", [
    ("llvm.x86.avx512.vpdpbusd.128", 4, np.uint8), ("llvm.x86.avx512.vpdpbusd.256", 8, np.uint8),
    ("llvm.x86.avx512.vpdpbusd.512", 16, np.uint8), ("llvm.aarch64.neon.usdot.v4i32.v16i8", 4, np.uint8),
    ("llvm.aarch64.neon.sdot.v4i32.v16i8", 4, np.int8)])
def test_a_dot_product_of_four_bytes_is_exact(name, lanes, dtype):
    acc, x, w = bytes_of(0, np.int32, 16)[:lanes], bytes_of(1, dtype, 4 * lanes), bytes_of(2, np.int8, 4 * lanes)
    types = [f"<{lanes} x i32>", *[f"<{4 * lanes} x i8>"] * 2]
    products = (x.astype(np.int64) * w).reshape(lanes, 4).sum(1)
    got = call(name, types, types[0], [acc, x, w])[:4 * lanes].view(np.int32)
    np.testing.assert_array_equal(got, (acc + products).astype(np.int32))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name, lanes", [("llvm.x86.avx2.pmadd.wd", 8), ("llvm.x86.avx512.pmaddw.d.512", 16)])
def test_products_of_shorts_are_summed_in_pairs(name, lanes, native):
    if native and not (runs_here(AVX2) and lanes == 8):
        pytest.skip("this machine lacks the instruction")
    a, b = bytes_of(0, np.int16, 2 * lanes), bytes_of(1, np.int16, 2 * lanes)
    expected = (a.astype(np.int64) * b).reshape(lanes, 2).sum(1).astype(np.int32)
    got = call(name, [f"<{2 * lanes} x i16>"] * 2, f"<{lanes} x i32>", [a, b], native)
    np.testing.assert_array_equal(got[:4 * lanes].view(np.int32), expected)


@pytest.mark.parametrize("native", [False, True])
def test_products_of_bytes_saturate_in_pairs(native):
    if native and not runs_here(AVX2):
        pytest.skip("this machine lacks the instruction")
    a, b = bytes_of(0, np.uint8, 32), bytes_of(1, np.int8, 32)
    a[:4], b[:4] = 255, [127, 127, -128, -128]
    expected = np.clip((a.astype(np.int64) * b).reshape(16, 2).sum(1), -(1 << 15), (1 << 15) - 1)
    got = call("llvm.x86.avx2.pmadd.ub.sw", ["<32 x i8>"] * 2, "<16 x i16>", [a, b], native)
    np.testing.assert_array_equal(got[:32].view(np.int16), expected)


@pytest.mark.parametrize("native", [False, True])
def test_bytes_take_the_signs_of_others(native):
    if native and not runs_here(AVX2):
        pytest.skip("this machine lacks the instruction")
    a, signs = bytes_of(0, np.int8, 32), bytes_of(1, np.int8, 32)
    signs[8:12] = 0
    got = call("llvm.x86.avx2.psign.b", ["<32 x i8>"] * 2, "<32 x i8>", [a, signs], native)
    np.testing.assert_array_equal(got[:32].view(np.int8), a * np.sign(signs))


@pytest.mark.parametrize("native", [False, True])
def test_bytes_are_picked_inside_each_128_bit_part(native):
    if native and not runs_here(AVX2):
        pytest.skip("this machine lacks the instruction")
    a, picks = bytes_of(0, np.uint8, 32), bytes_of(1, np.int8, 32)
    expected = np.where(picks < 0, 0, a[np.arange(32) // 16 * 16 + picks % 16])
    got = call("llvm.x86.avx2.pshuf.b", ["<32 x i8>"] * 2, "<32 x i8>", [a, picks], native)
    np.testing.assert_array_equal(got[:32], expected)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name, bits", [
    ("llvm.x86.avx2.packssdw", 256), ("llvm.x86.avx2.packuswb", 256),
    ("llvm.x86.avx512.packssdw.512", 512), ("llvm.x86.avx512.packuswb.512", 512)])
def test_packs_saturate_inside_each_128_bit_part(name, bits, native):
    if native and not (runs_here(AVX2) and bits == 256):
        pytest.skip("this machine lacks the instruction")
    signed = "packssdw" in name
    wide, narrow, size = (np.int32, np.int16, 32) if signed else (np.int16, np.uint8, 16)
    lanes, info = bits // size, np.iinfo(narrow)
    a, b = (bytes_of(seed, wide, lanes) >> np.arange(lanes) % 16 for seed in (0, 1))
    parts = [np.concatenate(pair) for pair in zip(np.split(a, bits // 128), np.split(b, bits // 128), strict=True)]
    expected = np.clip(np.concatenate(parts), info.min, info.max).astype(narrow)
    got = call(name, [f"<{lanes} x i{size}>"] * 2, f"<{2 * lanes} x i{size // 2}>", [a.astype(wide), b.astype(wide)],
               native)
    np.testing.assert_array_equal(got[:bits // 8].view(narrow), expected)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_a_dot_product_of_bfloats_adds_odd_then_even(lanes):
    random = np.random.default_rng(0)
    acc = random.standard_normal(lanes).astype(np.float32)
    a, b = (random_array(random, "bfloat16", (2 * lanes,)) for _ in range(2))
    x, y = ((v.astype(np.uint32) << 16).view(np.float32).reshape(lanes, 2) for v in (a, b))
    types = [f"<{lanes} x float>", *[f"<{2 * lanes} x bfloat>"] * 2]
    got = call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}", types, types[0], [acc, a, b])[:4 * lanes].view(np.float32)
    np.testing.assert_array_equal(got, acc + x[:, 1] * y[:, 1] + x[:, 0] * y[:, 0])


@pytest.mark.parametrize("lanes", [8, 16])
def test_bfloats_are_rounded_half_to_even_and_denormals_are_zero(lanes):
    random = np.random.default_rng(0)
    halves = (np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF], np.uint32)).view(np.float32)       # down, up, to infinity
    x = np.concatenate([halves, -halves, random.standard_normal(lanes)]).astype(np.float32)[:lanes]
    name, types = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * lanes}", ([f"<{lanes} x float>"], f"<{lanes} x bfloat>")

    def rounded(values):
        return call(name, *types, [np.resize(values, lanes).astype(np.float32)])[:2 * lanes].view(np.uint16)

    np.testing.assert_array_equal(rounded(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(rounded([1e-39, -1e-39, np.inf, -np.inf])[:4], [0, 0x8000, 0x7F80, 0xFF80])
    assert np.isnan(rounded(np.array([0x7F800001], np.uint32).view(np.float32)).view(ml_dtypes.bfloat16)).all()


def test_spills_are_counted():
    text = assembly("define void @f(ptr %x) { ret void }", PORTABLE)
    assert spills(text) == 0
    assert spills(text + "\n\tvmovups\t%ymm3, 32(%rsp)\n\tvmovaps\t(%rbp), %zmm1\n\tvmovups\t%ymm0, (%rdi)\n") == 2


@pytest.mark.parametrize("native", [False, True])
def test_powers_of_two_are_split_and_scaled_as_by_integers(native):
    if native and not runs_here(AVX512_AMX):
        pytest.skip("this machine lacks the instructions")
    module = Module(None if native else EMULATION)
    f = module.function("kernel", operands=PTR, a=I64, b=I64, c=I64, d=I64)
    x, parts, result = (f.load(PTR, f.parameters["operands"] + 8 * i) for i in range(3))
    n, fraction = Scaling().parts(f.load(AVX512_AMX.floats, x))
    f.store(fraction, parts)
    f.store(Scaling().scaled(fraction + 1.25, n), result)
    kernel = LoadedKernel(module.text(), "kernel", AVX512_AMX, emulate=not native)
    random = np.random.default_rng(0)
    for low in (-126, -30, -1):
        x = random.uniform(low, 0, 16).astype(np.float32)
        x[:4] = [low, low + 0.5, -0.5, -0.0]
        parts, result = np.zeros(16, np.float32), np.zeros(16, np.float32)
        kernel([x, parts, result], (0, 1))
        integers, expected = NUMPY.parts(x)
        np.testing.assert_array_equal(parts, expected)
        np.testing.assert_array_equal(result, NUMPY.scaled(expected + np.float32(1.25), integers))
