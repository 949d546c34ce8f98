"""Products of two run-time tensors and attention by tile registers: exact in INT8, whatever shape, mask and layout."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX512_AMX, AVX512_BF16, AVX512_VNNI
from infer_server.engines.backends.llvm.kernels.kernel import kernels_for
from infer_server.engines.backends.llvm.kernels.matrix_unit.attention import AmxTiles, MatrixUnitAttention
from infer_server.engines.backends.llvm.kernels.matrix_unit.product import (
    AmxProductTile,
    MatrixUnitIntegerProduct,
    MatrixUnitProduct,
)
from scripts.testing.suite import check, run
from tests.engines.backends import test_attention, test_product
from tests.engines.backends.llvm.jit import runs_here
from tests.engines.backends.llvm.runner import CpuRunner, DynamicRunner
from tests.engines.backends.runners import ALL_COMBINATIONS, rotated

CPU, HERE = CpuRunner(AVX512_AMX), runs_here(AVX512_AMX)
ATTENTION = test_attention.SHAPES | {
    "heads of 32, 128 keys": test_attention.Shape(2, 48, 128, 32, 32, "keys"),
    "heads of 64, queries past a block": test_attention.Shape(1, 37, 130, 64, 64),
    "depth of two blocks, values of two panels": test_attention.Shape(1, 33, 70, 96, 80, "full"),
    "an odd depth of three blocks": test_attention.Shape(1, 20, 33, 133, 17, "heads", k_first=True),
}
PRODUCTS = test_product.SHAPES | {
    "tiles of 32 rows and a tail": test_product.Shape((2,), 70, 64, 48),
    "a tail of more than a register, two panels": test_product.Shape((), 61, 128, 100, gaps=True),
    "blocks that do not divide K": test_product.Shape((2,), 33, 150, 65, turned=True),
}
EVERY_ATTENTION = pytest.mark.parametrize("name", ATTENTION)
EVERY_PRODUCT = pytest.mark.parametrize("name", PRODUCTS)
NATIVE = pytest.mark.parametrize("native", [
    False, pytest.param(True, marks=pytest.mark.skipif(not HERE, reason="no tile registers here"))])


def tactics_of(kernel):
    """Return the kernel's tactics; for few rows, for which it offers none, one that it can run."""
    return kernel.tactics(AVX512_AMX) or [
        AmxTiles((16, 1), (16, AVX512_AMX.vectors_for(kernel.problem.v.shape[-1])), kernel.problem.queries)
        if isinstance(kernel, MatrixUnitAttention) else AmxProductTile(16, 1)]


def attention(name, precision, **options):
    spec, inputs, constants = test_attention.problem(ATTENTION[name], precision, **options)
    return MatrixUnitAttention(spec), inputs, constants


def check_in_turn(kernel, inputs, constants, tolerance, number):
    """Check all tactics, natively and emulated in turn, `number` first; emulated if this machine has no tiles."""
    for n, tactic in enumerate(tactics_of(kernel), number):
        for native in (False, True) if ALL_COMBINATIONS and HERE else (HERE and n % 2 == 1,):
            check(kernel, CPU, inputs, constants, tolerance, tactic=tactic, pieces=2, slack=4, native=native)


@EVERY_ATTENTION
def test_attention_of_bytes_equals_its_reference_bit_for_bit(name):
    kernel, inputs, constants = attention(name, "int8")
    check_in_turn(kernel, inputs, constants, 0, [*ATTENTION].index(name))


@EVERY_ATTENTION
def test_attention_of_bfloat_agrees_with_its_reference(name):
    kernel, inputs, constants = attention(name, "bf16", result="float32")
    check_in_turn(kernel, inputs, constants, test_attention.TOLERANCE["bf16"], [*ATTENTION].index(name) + 1)


@EVERY_ATTENTION
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_attention_that_reads_its_extents_at_run_time_agrees_with_its_reference(name, precision):
    kernel, inputs, constants = attention(name, precision, result="uint8" if precision == "int8" else "float32")
    tolerance = test_attention.TOLERANCE[precision]
    check(kernel, DynamicRunner(AVX512_AMX), inputs, constants, tolerance, tactic=tactics_of(kernel)[0], pieces=2,
          slack=4)


# ---- products
def product(name, precision, **options):
    spec, inputs, constants = test_product.problem(PRODUCTS[name], precision, **options)
    return MatrixUnitProduct(spec), inputs, constants


@EVERY_PRODUCT
def test_a_product_of_bytes_equals_its_reference_bit_for_bit(name):
    kernel, inputs, constants = product(name, "int8")
    check_in_turn(kernel, inputs, constants, 0, [*PRODUCTS].index(name))


@EVERY_PRODUCT
def test_a_product_of_bfloat_agrees_with_its_reference(name):
    kernel, inputs, constants = product(name, "bf16", result="float32")
    check_in_turn(kernel, inputs, constants, test_product.TOLERANCE["bf16"], [*PRODUCTS].index(name) + 1)


@EVERY_PRODUCT
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_a_product_that_reads_its_extents_at_run_time_agrees_with_its_reference(name, precision):
    kernel, inputs, constants = product(name, precision, result="uint8" if precision == "int8" else "float32")
    check(kernel, DynamicRunner(AVX512_AMX), inputs, constants, test_product.TOLERANCE[precision],
          tactic=tactics_of(kernel)[0], pieces=2, slack=4)


@rotated("shape, zeros, emulated", PRODUCTS, test_product.ZEROS, {"emulated": True, "native": False})
def test_a_product_with_zero_points_in_memory_is_exact(shape, zeros, emulated):
    spec, inputs = test_product.integers(shape, zeros)
    kernel = MatrixUnitIntegerProduct(spec)
    check(kernel, CPU, inputs, {}, tactic=tactics_of(kernel)[0], pieces=2, slack=4, native=HERE and not emulated)


# ---- the choice of tactics
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_vectors_and_tiles_are_both_offered_and_tiles_cost_less(precision):
    for spec in (attention("heads of 32, 128 keys", precision)[0].problem,
                 product("a tail of more than a register, two panels", precision)[0].problem):
        costs = {type(kernel): kernel.cost(AVX512_AMX, tactic) for kernel in kernels_for(spec)
                 for tactic in kernel.tactics(AVX512_AMX)}
        vectors, tiles = costs.values()
        assert 0 < tiles < vectors


@pytest.mark.parametrize("isa", [AVX512_BF16, AVX512_VNNI])
def test_cpus_without_a_matrix_unit_have_no_such_tactics(isa):
    kernels = attention("heads of 32, 128 keys", "int8")[0], product("16x16x16", "int8")[0]
    assert not any(kernel.tactics(isa) for kernel in kernels)


def test_other_precisions_and_a_few_rows_are_left_to_vectors():
    kernels = [attention("heads of 32, 128 keys", precision)[0] for precision in ("fp32", "fp16")]
    kernels += [attention("a few queries, an odd depth", "int8")[0], product("one row, deep", "int8")[0]]
    assert not any(kernel.tactics(AVX512_AMX) for kernel in kernels)


def test_blocks_of_attention_are_refined():
    kernel, _, _ = attention("heads of 32, 128 keys", "int8")
    first, *_ = kernel.tactics(AVX512_AMX)
    assert {one.block for one in kernel.refinements(AVX512_AMX, first)} == {16, 48}


# ---- padding
def test_what_lies_past_the_depth_of_bfloat_is_not_multiplied():
    """An infinity there would make a NaN of a zero weight."""
    spec, (a, b, *others), constants = test_product.problem(test_product.Shape((), 40, 39, 16), "bf16",
                                                            result="float32")
    kernel = MatrixUnitProduct(spec)
    expected, = run(kernel, CPU, [a, b, *others], constants)
    for other in (1, 5):        # rows that are contiguous in memory: what lies past one is the start of the next
        x = a.copy()
        x[:, other, 0] = 0x7F80
        got, = run(kernel, CPU, [x, b, *others], constants)
        changed = (got != expected).any((0, 2))
        assert changed[other] and changed.sum() == 1


@NATIVE
@pytest.mark.parametrize("name", ["nothing a multiple of anything", "16 tokens, 8 deep", "keys transposed in memory"])
def test_what_scratch_memory_held_is_not_multiplied(name, native):
    """Another kernel leaves NaN on the stack."""
    larger, inputs, constants = attention("heads of 64, queries past a block", "bf16", result="float32")
    nothing = [np.full_like(array, 0x7FC0) for array in inputs]
    run(larger, CPU, nothing, constants, tactic=tactics_of(larger)[0], slack=4, native=native)
    kernel, inputs, constants = attention(name, "bf16", result="float32")
    check(kernel, CPU, inputs, constants, test_attention.TOLERANCE["bf16"], tactic=tactics_of(kernel)[0], slack=4,
          native=native)
