"""Tests of the choice of candidates that are timed, and of the tactics chosen without timing."""
from dataclasses import replace

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX2, AVX512_VNNI, best_isa
from infer_server.engines.backends.llvm.kernels.contraction.direct import DirectContraction
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile
from infer_server.engines.backends.llvm.kernels.depthwise.depthwise import DepthwiseKernel
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Window
from infer_server.engines.backends.llvm.kernels.winograd.winograd import WinogradContraction
from infer_server.engines.backends.llvm.tuning import candidate_times, timing
from infer_server.engines.backends.llvm.tuning.candidate_times import cheapest_of_each_kernel, promising
from infer_server.engines.backends.llvm.tuning.candidates import Candidate
from infer_server.engines.backends.llvm.tuning.nearest import correction
from infer_server.engines.backends.llvm.tuning.timing import measure
from infer_server.engines.backends.llvm.tuning.tuner import Tuner, mean_ratios
from infer_server.engines.lowering.epilogue.program import EpilogueProgram, Instruction
from infer_server.engines.lowering.problems.convolution import Contraction, Depthwise
from infer_server.engines.lowering.problems.view import Halo, View, dense_view
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.timing_cache import TimingCache

PROGRAM = EpilogueProgram()


def conv(pixels, cin, cout, taps=1):
    x = dense_view("uint8", (pixels + taps - 1, pixels + taps - 1, cin))
    y = dense_view("uint8", (pixels, pixels, cout))
    spec = Contraction(x, y, (), PROGRAM, "int8", (taps, taps))
    return replace(spec, border=Halo(1, 1, 1, 1)) if taps == 3 else spec


def taken(spec, batches=(1,)):
    """Return the tactic that is chosen without timing."""
    weights = np.zeros((spec.y.shape[2], 1 if isinstance(spec, Depthwise) else spec.x.shape[2], *spec.taps), np.int8)
    tuner = Tuner(AVX512_VNNI, TimingCache(), "", timing=False)
    return tuner.choose({spec: {"weights": weights, "program": []}}, batches=batches)[spec].tactic


def test_without_timing_the_shape_of_a_layer_decides():
    assert taken(conv(14, 512, 128)).shape == (14, 2)           # a deep reduction: many pixels for each weight
    assert taken(conv(28, 64, 256)).shape == (6, 4)             # an expansion: little to add up, much to store
    assert taken(conv(7, 128, 128, taps=3)).skip                # a seventh of the rows and columns is border
    assert taken(conv(1, 512, 256)).vectors == 4                # one pixel: as many sums as there are


def test_rows_of_a_batch_share_weights_though_one_row_alone_cannot():
    assert taken(conv(1, 512, 256)).cols == 1
    assert taken(conv(1, 512, 256), (1, 32)).cols > 3


def test_a_depthwise_tile_shares_the_interleaving_of_rows():
    image = dense_view("uint8", (28, 28, 192))
    spec = Depthwise(dense_view("uint8", (30, 30, 192)), image, (), PROGRAM, "int8", (3, 3))
    assert (taken(spec).rows, taken(spec).vectors) == (2, 4)


def test_a_plan_that_runs_a_few_times_is_packed_by_moving_weights_only():
    spec = replace(conv(56, 64, 64, taps=3), bounded=True)
    constants = {"weights": np.ones((64, 64, 3, 3), np.int8), "program": []}
    lasting, short = (Tuner(AVX2, TimingCache(), "", timing=False, short_lived=short).choose({spec: constants})[spec]
                      for short in (False, True))
    assert (type(lasting.kernel), type(short.kernel)) == (WinogradContraction, DirectContraction)


def test_a_tile_that_was_timed_without_prefetch_only_tells_of_the_same_tile_with_it():
    """Refinements of the direct kernel are not timed if another kernel won."""
    known = {repr(Tile(1, 5, 2)): 0.7, repr(Tile(1, 6, 2)): 0.9}
    assert correction(Tile(1, 5, 2, prefetch=True), known) == 0.7
    assert correction(Tile(1, 5, 2, prefetch=True), known | {repr(Tile(1, 5, 2, prefetch=True)): 0.8}) == 0.8
    assert correction(Tile(1, 5, 2), {"Other(rows=1, cols=5, vectors=2)": 0.7}) == float("inf")


@pytest.mark.parametrize("spec, sizes", [(conv(1, 64, 64), {1, 8}), (conv(7, 64, 64), {1})])
def test_kernels_cut_by_batch_are_timed_with_one_item_and_with_many(spec, sizes, monkeypatch):
    """The stand-in clock returns the number of grid rows that ran."""
    cache, isa = TimingCache(), best_isa(detect().features)
    monkeypatch.setattr(candidate_times, "measure", lambda calls: {tactic: 1.0 for tactic in calls})
    constants = {"weights": np.zeros((64, 64, 1, 1), np.int8), "program": []}
    seen = []
    real = candidate_times.call_of
    monkeypatch.setattr(candidate_times, "call_of", lambda *arguments: seen.append(arguments[3]) or real(*arguments))
    for _ in range(2):          # the second tuner finds all in the cache
        tuner = Tuner(isa, cache, "")
        choice = tuner.choose({spec: constants}, batches=(1, 8))[spec]
    assert set(seen) == sizes and tuner.timed == 0
    assert choice.further_item == (0 if len(sizes) > 1 else 1), "a batch takes no longer than an item, or nobody knows"


def test_each_batch_counts_alike_however_long_it_takes():
    """A third of the time at one row outweighs a tenth more time at many rows."""
    ratios = mean_ratios({"few": (1.0, 110.0), "many": (3.0, 100.0)})
    assert ratios["few"] < ratios["many"]
    ratios = mean_ratios({"few": (1.0, 310.0), "many": (2.0, 100.0)})
    assert ratios["many"] < ratios["few"]


def test_the_hopeless_are_not_timed_but_in_a_survey(monkeypatch):
    timed = []

    def times(self, pool, wanted, tactics, report, share_tiles=False):
        timed.extend(tactic for some in tactics.values() for tactic in some)
        return {spec: dict.fromkeys(some, (1.0,)) for spec, some in tactics.items()}

    monkeypatch.setattr(candidate_times.CandidateTimes, "find", times)
    spec = conv(1, 512, 256)
    Tuner(AVX512_VNNI, TimingCache(), "").choose({spec: {}})
    assert {tactic.vectors for tactic in DirectContraction(spec).tactics(AVX512_VNNI)} == {1, 2, 4}
    assert timed and 1 not in {candidate.tactic.vectors for candidate in timed}
    timed.clear()
    surveyed = Tuner(AVX512_VNNI, TimingCache(), "").survey({spec: {}})[spec]
    assert set(surveyed) == set(timed) and {candidate.tactic.vectors for candidate in timed} == {1, 2, 4}


def kernels_of_costs(*costs):
    """Return candidates of one kernel with these costs."""
    kernel = DirectContraction(conv(14, 64, 64))
    some = [Candidate(kernel, Tile(1, cols + 1, 2)) for cols in range(len(costs))]
    return some, dict(zip(some, costs, strict=True))


def test_the_less_time_a_problem_takes_the_fewer_candidates_are_tried():
    some, costs = kernels_of_costs(100.0, 102.0, 105.0, 111.0, 125.0)
    tried = [promising(some, costs, {some[0]: 10.0}, share) for share in (0.5, 0.006, 0.001)]
    assert tried[0] == some[1:4] and tried[1] == some[1:3] and tried[2] == some[1:2]


def test_a_kernel_whose_cheapest_candidate_is_far_behind_is_not_tried_further():
    some, costs = kernels_of_costs(100.0, 101.0)
    other = Candidate(WinogradContraction(replace(conv(14, 64, 64, taps=3), bounded=True)), "any")
    assert not promising([*some, other], costs | {other: 90.0}, {some[0]: 20.0, other: 10.0}, 0.5)


def test_the_cheapest_of_each_kernel_is_timed_first():
    some, _ = kernels_of_costs(1.0, 2.0)
    other = Candidate(WinogradContraction(replace(conv(14, 64, 64, taps=3), bounded=True)), "any")
    assert cheapest_of_each_kernel([some[0], other, some[1]]) == [some[0], other]


def test_a_plan_that_runs_a_few_times_takes_tiles_of_little_code():
    spec = conv(40, 64, 64)
    kernel = DirectContraction(spec)
    constants = {"weights": np.zeros((64, 64, 1, 1), np.int8), "program": []}
    lasting, short = (kernel.code_size(AVX512_VNNI, Tuner(AVX512_VNNI, TimingCache(), "", timing=False,
                      short_lived=few).choose({spec: constants})[spec].tactic) for few in (False, True))
    assert short < lasting


def test_a_long_depthwise_program_has_no_tile_that_leaves_the_instruction_cache():
    def most(*program):
        spec = Depthwise(dense_view("uint8", (30, 30, 256)), dense_view("uint8", (28, 28, 256)), (),
                         EpilogueProgram(tuple(program), 0, 0), "int8", (3, 3))
        return max(tile.rows * tile.cols * tile.vectors for tile in DepthwiseKernel(spec).tactics(AVX512_VNNI))
    assert most() == 112 and most(Instruction("silu_u8", (0,))) == 56


def test_a_clock_that_stands_still_for_a_moment_makes_nobody_the_fastest(monkeypatch):
    clock = iter([0.0, 0.0, 1.0, 4.0, *np.arange(10.0, 1e4, 3.0)])       # the first call seems to take no time
    monkeypatch.setattr(timing, "thread_seconds", lambda: next(clock))
    monkeypatch.setattr(timing, "ROUNDS", 0)
    assert measure({"one": lambda: 1.0, "other": lambda: 1.0}) == {"one": 3e6, "other": 3e6}


@pytest.mark.parametrize("parts, runs", [
    (1, [(0, 12)] * 3), (3, [(0, 4), (4, 8), (8, 12)]), (7, [(0, 2), (2, 4), (4, 6)]), (99, [(0, 2), (2, 4), (4, 6)])])
def test_what_takes_long_is_timed_by_parts_that_follow_each_other(parts, runs):
    seen = []
    call = timing.call_of(lambda _, *rows_and_columns: seen.append(rows_and_columns), [], Grid(6, 2, 5), 2, parts)
    shares = [call() for _ in range(3)]
    assert seen == [(begin, end, 0, 5) for begin, end in runs]
    assert shares == [(end - begin) / 12 for begin, end in runs]


def test_parts_are_timed_as_all_of_the_work_would_take(monkeypatch):
    clock = iter(np.arange(0.0, 1e4, 3.0))
    monkeypatch.setattr(timing, "thread_seconds", lambda: next(clock))
    monkeypatch.setattr(timing, "ROUNDS", 0)
    assert measure({"all": lambda: 1.0, "third": lambda: 1 / 3}) == {"all": 3e6, "third": 9e6}


def test_parts_are_made_of_much_work_that_reads_little_besides():
    image = conv(1024, 64, 64)
    assert timing.parts_of(conv(7, 64, 64), 1, 64 * 64 * 9) == 1
    assert timing.parts_of(image, 1, 64 * 64 * 9) == image.macs // timing.PART_MACS > 1
    assert timing.parts_of(image, 1, image.bytes) == 1


def test_a_view_that_runs_backwards_is_timed_and_watched_before_its_element_0_too():
    view = View("float32", (3, 8), (32, -4), 96)
    memory = timing.memory_of(view, 2)
    assert memory.ctypes.data - memory.base.ctypes.data >= 28 and memory.nbytes >= 96 + 2 * 32 + 4
    assert Window.whole(view) == Window(-28, 2 * 32 + 4)
    assert Window.along(view) == Window(-28, 4, 1, 32)                      # a row
    assert Window.along(view, 1) == Window(0, 2 * 32 + 4, 1, -4)            # a column
