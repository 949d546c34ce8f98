"""Matrix products that also write their rows divided by a scale, on every instruction set, bit for bit."""
from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX2, AVX512_AMX, AVX512_VNNI
from infer_server.engines.backends.llvm.kernels.contraction import tiled
from infer_server.engines.backends.llvm.kernels.contraction.direct import DirectContraction
from infer_server.engines.backends.llvm.kernels.kernel import kernels_for
from infer_server.engines.backends.llvm.kernels.matrix_unit.contraction import MatrixUnitContraction
from infer_server.engines.ir.rounding import STEPS, UNSIGNED_STEPS
from infer_server.engines.lowering.problems.convolution import Contraction, ScaledContraction
from infer_server.engines.lowering.problems.view import dense_view
from infer_server.engines.plan.plan import SLACK
from scripts.testing.suite import check, gapped
from tests.engines.backends.llvm.runner import CpuRunner, DynamicRunner
from tests.engines.backends.runners import EVERY_ISA
from tests.engines.backends.test_contraction import BATCH, SHAPES, Shape, problem

ROWS = Shape(1, 37, 40, 70)         # several tiles and panels, with tails
EVERY_STEPS = pytest.mark.parametrize("steps, writes_y", [(STEPS, True), (UNSIGNED_STEPS, False)])


def scaled(shape, steps=STEPS, writes_y=True, view=dense_view):
    """Return (spec, inputs, constants) of a product whose rows differ in size."""
    spec, inputs, constants = problem(shape, "int8", stored="float32", residual=False)
    known = {field.name: getattr(spec, field.name) for field in fields(Contraction)}
    spec = ScaledContraction(**known, numbers=view("uint8", spec.y.shape), steps=steps, writes_y=writes_y,
                             scales=view("float32", (*spec.y.shape[:-1], 1)))
    inputs[0][:, :, ::3] //= 16
    return spec, inputs, constants


@EVERY_ISA
@EVERY_STEPS
def test_numbers_and_scales_equal_the_reference(steps, writes_y, cpu):
    spec, inputs, constants = scaled(ROWS, steps, writes_y)
    *rows, numbers, scales = spec.reference(inputs, constants)
    assert len(rows) == writes_y and len(spec.outputs) == 2 + writes_y
    assert numbers.std() > 10 and np.ptp(scales) > 0.5 * scales.mean()
    for kernel in cpu.ways(spec):
        for block in (0, 2):
            tactic = replace(kernel.tactics(cpu.isa)[0], block=block)
            check(kernel, cpu, inputs, constants, tactic=tactic, pieces=2, slack=15)


@EVERY_ISA
@pytest.mark.parametrize("batch, writes_y", [(1, False), (3, True), (13, False)])
def test_a_batch_of_single_rows_is_scaled_row_by_row(batch, writes_y, cpu):
    spec, inputs, constants = scaled(SHAPES["gemm of one row an item"], writes_y=writes_y)
    kernel = kernels_for(spec, batch)[0]
    assert kernel.by_batch
    check(kernel, cpu, [np.resize(x, (batch, *x.shape[1:])) for x in inputs], constants, pieces=2, slack=15)


@EVERY_STEPS
def test_every_tactic_of_a_matrix_unit_finishes_a_block_before_its_rows_are_scaled(steps, writes_y):
    spec, inputs, constants = scaled(Shape(1, 70, 64, 70), steps, writes_y)
    kernel, cpu = MatrixUnitContraction(spec), CpuRunner(AVX512_AMX)
    for number, tactic in enumerate(kernel.tactics(AVX512_AMX)):
        tactic = replace(tactic, block=number % 3, prefetch=number % 2 == 1)
        check(kernel, cpu, inputs, constants, tactic=tactic, pieces=2, slack=3)


@pytest.mark.parametrize("isa", [AVX2, AVX512_VNNI, AVX512_AMX], ids=lambda isa: isa.name)
@pytest.mark.parametrize("shape", [ROWS, SHAPES["gemm of one row an item"]], ids=["rows", "single rows"])
def test_kernels_that_read_their_extents_at_run_time_equal_the_reference(shape, isa):
    spec, inputs, constants = scaled(shape, writes_y=False)
    check(spec, DynamicRunner(isa), inputs, constants, pieces=2, slack=15)


def test_results_may_have_gaps_between_their_rows():
    spec, inputs, constants = scaled(ROWS, view=gapped)
    for kernel in CpuRunner(AVX2).ways(spec):
        check(kernel, CpuRunner(AVX2), inputs, constants, pieces=2, slack=15)


def test_a_block_holds_what_stays_in_cache_and_columns_are_not_divided(monkeypatch):
    spec, inputs, constants = scaled(ROWS)
    kernel = DirectContraction(spec)
    tile = kernel.tactics(AVX512_VNNI)[0]
    assert kernel.block(tile) >= kernel.tile_rows(tile) and kernel.grid(AVX512_VNNI, tile).columns == 1
    assert kernel.scratch_bytes(tile) == 0
    monkeypatch.setattr(tiled, "BLOCK_BYTES", 2 * tile.cols * spec.y.strides[1])
    assert kernel.block(tile) == 2 < kernel.tile_rows(tile)
    check(kernel, CpuRunner(AVX512_VNNI), inputs, constants, tactic=tile, pieces=2, slack=15)
    assert len(inputs[0]) == BATCH
    inner = DirectContraction(replace(spec, writes_y=False))
    assert 0 <= inner.scratch_bytes(tile) - tiled.BLOCK_BYTES <= SLACK
    check(inner, CpuRunner(AVX512_VNNI), inputs, constants, tactic=tile, pieces=2, slack=15)
    assert {tactic.block for tactic in inner.refinements(AVX512_VNNI, tile)} == {0, 1, 2}
