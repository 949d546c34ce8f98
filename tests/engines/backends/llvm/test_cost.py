"""Tests of the cost model that orders tactics where nothing is timed."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX2, AVX512_VNNI, Isa
from infer_server.engines.backends.llvm.kernels.common.cost import Work, first_reading, reading
from infer_server.engines.backends.llvm.kernels.contraction.direct import DirectContraction
from infer_server.engines.backends.llvm.kernels.contraction.paired import PairedContraction
from infer_server.engines.backends.llvm.kernels.contraction.pairing import pair
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile, TiledContraction
from infer_server.engines.backends.llvm.kernels.depthwise.depthwise import DepthwiseKernel, DepthwiseTile
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.convolution import Contraction, Depthwise
from infer_server.engines.lowering.problems.view import dense_view


def product(rows: int, k: int, couts: int) -> Contraction:
    return Contraction(dense_view("uint8", (1, rows, k)), dense_view("uint8", (1, rows, couts)), (), EpilogueProgram(),
                       "int8")


def test_the_largest_count_takes_the_time_and_in_a_dense_loop_others_near_it_some_more() -> None:
    alone, near, nearer = Work(products=24), Work(products=24, others=15), Work(products=24, others=18, loads=20)
    assert alone.cycles == near.cycles == nearer.cycles == 12
    assert alone.congested_cycles == pytest.approx(12, rel=0.01)
    assert alone.congested_cycles < near.congested_cycles < nearer.congested_cycles < 1.25 * 12


def test_weights_come_from_beyond_the_caches_the_first_time_whatever_their_size() -> None:
    assert first_reading(1 << 10) > reading(1 << 10) == 0
    assert first_reading(1 << 20, prefetched=True) < reading(1 << 20) < first_reading(1 << 20)


@pytest.mark.parametrize(("kernel", "isa", "rows", "tile", "pays"), [
    (DirectContraction, AVX512_VNNI, 49, (14, 2), True),
    (PairedContraction, AVX2, 1, (1, 4), True),
    (PairedContraction, AVX2, 49, (3, 4), False)])       # all tiles of a panel ask for all of the next one
def test_a_prefetch_pays_where_few_tiles_wait_for_many_weights(
        kernel: type[TiledContraction], isa: Isa, rows: int, tile: tuple[int, int], pays: bool) -> None:
    solved = kernel(product(rows, 1024, 1024))
    plain: Tile = solved.tile(1, *tile)
    assert (solved.cost(isa, replace(plain, prefetch=True)) < solved.cost(isa, plain)) == pays


@pytest.mark.parametrize(("k", "narrow"), [(1024, False), (4000, False), (4096, True)])
def test_rows_that_push_each_other_out_of_the_first_level_make_narrow_tiles_cheaper(k: int, narrow: bool) -> None:
    """Rows of 4096 bytes map to one set of the L1 cache, which holds 6 of them, but not 14."""
    solved = DirectContraction(product(384, k, 1024))
    assert (solved.cost(AVX512_VNNI, solved.tile(1, 6, 4)) < solved.cost(AVX512_VNNI, solved.tile(1, 14, 2))) == narrow


@pytest.mark.parametrize(("width", "wide"), [(7, False), (480, True)])
def test_panels_of_half_a_line_cost_more_where_rows_of_an_image_leave_the_first_level(width: int, wide: bool) -> None:
    x, y = dense_view("float32", (11, width + 4, 64)), dense_view("float32", (7, width, 64))
    solved = DepthwiseKernel(Depthwise(x, y, (), EpilogueProgram(), "fp32", (5, 5)))
    half, whole = DepthwiseTile(2, 7, 1, by_tap=True), DepthwiseTile(2, 3, 2, by_tap=True)
    assert (solved.cost(AVX2, whole) < solved.cost(AVX2, half)) == wide


@pytest.mark.parametrize("vectors", [1, 2, 4])
@pytest.mark.parametrize("k", [16, 64, 256, 1024])
def test_the_steps_that_a_paired_kernel_is_charged_for_are_about_those_of_normal_weights(k: int, vectors: int) -> None:
    normal = np.random.default_rng(0).normal(size=(8, vectors * AVX2.lanes, 1, k))
    weights = np.rint(127 * normal / np.abs(normal).max(axis=-1, keepdims=True)).astype(np.int8)
    steps = float(np.diff(pair(weights, np.zeros(1, np.int64)).starts).mean())
    charged, _ = PairedContraction(product(8, k, 8 * vectors * AVX2.lanes)).turns_and_bytes(AVX2, vectors)
    assert charged == pytest.approx(steps, rel=0.2)
