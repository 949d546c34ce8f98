"""Kernels for GPUs, their PTX run on the CPU, against the exact references: a few problems of every family.

Everything else, by hand: INFER_TEST_GPUS=sm_61,sm_75,sm_80,sm_90a pytest tests/engines/backends
"""
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.cuda.codegen.gpu import GPUS
from infer_server.engines.backends.cuda.cost import CARDS
from infer_server.engines.backends.cuda.kernels.contraction.tile import Tile
from infer_server.engines.backends.cuda.kernels.kernel import cheapest
from infer_server.engines.backends.cuda.kernels.recurrent.caches import ThroughCaches
from infer_server.engines.backends.cuda.kernels.recurrent.lanes import Kept
from infer_server.engines.backends.cuda.kernels.recurrent.warps import Tiled
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from infer_server.engines.lowering.problems.elementwise import Pointwise
from infer_server.engines.lowering.problems.matmul import Attention
from infer_server.engines.lowering.problems.movement import HaloFill
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.lowering.problems.view import View, dense_view
from scripts.testing.gpu.cases import CASES, CONVOLUTIONS, FAMILIES, TOLERANCE, attention, convolution, product
from scripts.testing.gpu.ptx.text import Fault
from scripts.testing.gpu.runner import GpuRunner, Way, every_way, text_of, way_of
from scripts.testing.recurrence import Case as Layer
from scripts.testing.recurrence import node_of
from scripts.testing.suite import check
from tests.engines.backends.test_suppression import chosen, spec_of
from tests.engines.backends.test_suppression import draw as boxes_and_scores

SMALL = {**dict.fromkeys(("sm_61", "sm_70", "sm_75"), Tile(32, 32, (2, 2), 64, 2)),
         "sm_80": Tile(32, 64, (1, 2), 64, 3),
         "sm_90a": Tile(64, 64, (4, 1), 128, 3, grouped=True)}


def by(tile: Tile, gpu: str, problem: Problem) -> Way:
    return Way(way_of(problem, GPUS[gpu]).kernel, tile)


@pytest.mark.parametrize(("gpu", "precision"), [
    (gpu, precision) for precision in ("int8", "fp16") for gpu in SMALL])
def test_a_convolution_equals_its_reference_by_the_products_of_every_architecture(gpu: str, precision: str) -> None:
    problem, inputs, constants = convolution(precision)
    check(by(SMALL[gpu], gpu, problem), GpuRunner(GPUS[gpu]), inputs, constants, TOLERANCE[precision])


@pytest.mark.parametrize("gpu", ["sm_61", "sm_80"])
@pytest.mark.parametrize("shape", [
    *CONVOLUTIONS.values(), dict(precision="bf16"), dict(precision="fp32", cin=20),
    dict(precision="fp16", cin=28, taps=1)],
    ids=[*CONVOLUTIONS, "bfloat16", "float32", "halves, K in one stage"])
def test_convolutions_of_other_shapes_and_types_equal_theirs(shape: dict[str, Any], gpu: str) -> None:
    problem, inputs, constants = convolution(**shape)
    check(by(SMALL[gpu], gpu, problem), GpuRunner(GPUS[gpu]), inputs, constants, TOLERANCE[problem.precision])


# ---- the other families
ONCE = [f"{name}, {family.precisions[0]}" for name, family in FAMILIES.items() if "convolution" not in name]


@pytest.mark.parametrize("case", [*ONCE, "depthwise, fp16", "recurrence, fp32", "attention, fp32"])
def test_every_family_equals_its_reference(case: str) -> None:
    """Results are equal bit for bit, except for sums of floats."""
    (problem, inputs, constants), tolerance = CASES[case][0](), CASES[case][1]
    check(problem, GpuRunner(GPUS["sm_80"]), inputs, constants, tolerance)


def test_halves_are_added_to_floats_on_the_latest_architecture() -> None:
    """LLVM 22 and later use one instruction."""
    problem, inputs, constants = CASES["average, fp16"][0]()
    check(problem, GpuRunner(GPUS["sm_120"]), inputs, constants)


@pytest.mark.parametrize(("gpu", "precision", "ways"), [
    ("sm_61", "int8", 2), ("sm_75", "int8", 3), ("sm_75", "fp16", 3), ("sm_90a", "int8", 3), ("sm_80", "bf16", 3),
    ("sm_70", "fp16", 3)])
def test_an_attention_equals_its_reference_by_queries_and_by_tiles_of_them(gpu: str, precision: str, ways: int) -> None:
    problem, inputs, constants = attention(precision)
    found = every_way(problem, GPUS[gpu])
    assert len(found) == ways
    for way in found:
        check(way, GpuRunner(GPUS[gpu]), inputs, constants, TOLERANCE[precision])


@pytest.mark.parametrize(("gpu", "precision", "masked"), [
    ("sm_75", "int8", False), ("sm_75", "fp16", True), ("sm_80", "int8", True), ("sm_80", "bf16", False),
    ("sm_90a", "fp16", False)])
def test_an_attention_whose_keys_lie_in_shared_memory_equals_its_reference(
        gpu: str, precision: str, masked: bool) -> None:
    """There are several blocks and stages, the last of each partial."""
    problem, inputs, constants = attention(precision, 70, 150, (64, 32), masked)
    way, *_ = every_way(problem, GPUS[gpu])
    assert str(way.tactic) == "64 queries a block, keys in shared memory"
    check(way, GpuRunner(GPUS[gpu]), inputs, constants, TOLERANCE[precision])


@pytest.mark.parametrize(("gpu", "precision"), [("sm_61", "int8"), ("sm_70", "fp16"), ("sm_75", "fp32"),
                                                ("sm_80", "bf16")])
@pytest.mark.parametrize(("queries", "keys", "columns", "masked"), [
    (1, 300, (64, 32), False), (4, 150, (6, 70), True)], ids=["whole pieces", "columns that are in no piece"])
def test_an_attention_by_one_query_equals_its_reference(gpu: str, precision: str, queries: int, keys: int,
                                                        columns: tuple[int, int], masked: bool) -> None:
    """Kernels of a block and of a warp run, whose last iterations are partial."""
    problem, inputs, constants = attention(precision, queries, keys, columns, masked)
    found = {str(way.tactic): way for way in every_way(problem, GPUS[gpu])}
    for name in ("a query a block", "a query a warp"):
        check(found[name], GpuRunner(GPUS[gpu]), inputs, constants, TOLERANCE[precision])


def test_a_query_that_meets_infinity_where_it_has_no_columns_is_a_number() -> None:
    """Twelve floats are three pieces for four lanes, the last of which loads its neighbour's."""
    problem, (q, k, *others), constants = attention("fp32", columns=(12, 12))
    q[...], k[:, :, 3, 8:] = np.abs(q), -np.inf
    for way in every_way(problem, GPUS["sm_80"]):
        check(way, GpuRunner(GPUS["sm_80"]), [q, k, *others], constants, TOLERANCE["fp32"])


def test_an_attention_of_many_keys_is_of_tiles_where_there_are_any() -> None:
    view = dense_view("uint8", (2, 2048, 32))
    problem = Attention(view, view, view, view, None, ProgramBuilder(True).program(), "int8")
    assert str(way_of(problem, GPUS["sm_80"]).tactic) == "64 queries a block, keys in shared memory"
    assert str(way_of(problem, GPUS["sm_61"]).tactic) == "a query a warp"


@pytest.mark.parametrize(("gpu", "precision", "across"), [
    ("sm_75", "int8", False), ("sm_80", "int8", True), ("sm_80", "fp16", False), ("sm_80", "bf16", True),
    ("sm_70", "fp16", True)])
def test_a_product_of_two_tensors_equals_its_reference_by_tiles(gpu: str, precision: str, across: bool) -> None:
    problem, inputs, constants = product(precision, across)
    first, *_ = found = every_way(problem, GPUS[gpu])
    assert len(found) == 2 and str(first.tactic) == "16 x 32 a warp"
    check(first, GpuRunner(GPUS[gpu]), inputs, constants, TOLERANCE[precision])


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize(("gpu", "precision"), [("sm_75", "int8"), ("sm_75", "fp16"), ("sm_80", "int8"),
                                                ("sm_90a", "bf16")])
def test_a_product_out_of_shared_memory_equals_its_reference(gpu: str, precision: str, across: bool) -> None:
    """There are several blocks and stages, the last of each partial."""
    problem, inputs, constants = product(precision, across, rows=70, depth=176, columns=80)
    way, *_ = every_way(problem, GPUS[gpu])
    assert str(way.tactic) == "64 x 64 a block, in shared memory"
    check(way, GpuRunner(GPUS[gpu]), inputs, constants, TOLERANCE[precision])


def test_what_lies_behind_the_last_k_of_a_product_is_not_multiplied() -> None:
    """An infinity there would give NaN."""
    problem, (a, b, residual), constants = product("fp16", False, rows=70, depth=40, columns=80)
    b[..., -1, :] = np.inf
    a[..., -1] = 1
    way, *_ = every_way(problem, GPUS["sm_80"])
    check(way, GpuRunner(GPUS["sm_80"]), [a, b, residual], constants, TOLERANCE["fp16"])


@pytest.mark.parametrize(("case", "shared"), [("nest of many turns", {1: 16, 2: 32}),
                                              ("nest of many turns, stored inside", {2: 512})])
def test_a_nest_equals_its_reference_however_many_threads_an_element_has(case: str, shared: dict[int, int]) -> None:
    """An element has one thread, a warp or a block, which is cheapest for many iterations."""
    problem, inputs, constants = CASES[f"{case}, fp32"][0]()
    found = every_way(problem, GPUS["sm_80"])
    assert [way.tactic.threads for way in found] == [1, 32, 512]
    assert found[2].kernel.shared_loops(found[2].tactic) == shared
    assert cheapest(found[0].kernel, CARDS["sm_80"], 1) == found[2].tactic
    for way in found:
        check(way, GpuRunner(GPUS["sm_80"]), inputs, constants)


def test_a_nest_with_a_cycle_equals_its_reference_however_many_threads_an_element_has() -> None:
    problem, inputs, constants = CASES["nest with a cycle, fp32"][0]()
    found = every_way(problem, GPUS["sm_80"])
    assert [way.tactic.threads for way in found] == [1, 32, 512]
    for way in found:
        check(way, GpuRunner(GPUS["sm_80"]), inputs, constants)


@pytest.mark.parametrize(("gpu", "case"), [("sm_61", "lstm, int16"), ("sm_75", "recurrence, fp32"),
                                           ("sm_80", "recurrence, int8"), ("sm_80", "lstm, rounded, int8")])
def test_a_recurrent_layer_equals_its_reference_wherever_its_weights_are(gpu: str, case: str) -> None:
    """Weights are in registers and shared memory, or in the caches, for one item and for several."""
    (problem, inputs, constants), tolerance = CASES[case][0](), CASES[case][1]
    first, *_ = every_way(problem, GPUS[gpu])
    assert first.tactic.parts > 1
    for tactic in (Kept(4, 2), ThroughCaches(1), ThroughCaches(4)):
        check(Way(first.kernel, tactic), GpuRunner(GPUS[gpu]), inputs, constants, tolerance)


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_a_recurrent_layer_whose_last_units_are_three_reads_no_other_states(precision: str) -> None:
    """The compiler loads four states there, so the fourth must be written."""
    layer = Layer(node_of("GRU"), 7, precision, steps=2)
    kernel = way_of(layer.spec, GPUS["sm_80"]).kernel
    check(Way(kernel, ThroughCaches(1)), GpuRunner(GPUS["sm_80"]), layer.inputs, layer.constants, TOLERANCE[precision])


@pytest.mark.parametrize(("gpu", "case", "tactic"), [
    ("sm_75", "recurrence, int16", Tiled(8, 1, 5, 1)), ("sm_80", "recurrence, int8", Tiled(16, 2, 0, 0)),
    ("sm_80", "lstm, int16", Tiled(8, 2, 0, 0)), ("sm_80", "lstm, rounded, int8", Tiled(8, 1, 3, 1)),
    ("sm_90a", "lstm, int8", Tiled(16, 1, 8, 1))])
def test_a_recurrent_layer_equals_its_reference_by_tensor_cores(gpu: str, case: str, tactic: Tiled) -> None:
    """The items leave the last block partial; weights are in any memory."""
    problem, inputs, constants = CASES[case][0]()
    assert len(inputs[0]) % tactic.items
    found = every_way(problem, GPUS[gpu])
    assert any(isinstance(way.tactic, Tiled) and way.tactic.items == tactic.items for way in found)
    check(Way(found[0].kernel, tactic), GpuRunner(GPUS[gpu]), inputs, constants)


def test_a_recurrent_layer_of_a_large_batch_is_multiplied_by_tensor_cores() -> None:
    """The cost model chooses them; floats and small batches are computed without."""
    kernels = {precision: way_of(CASES[f"lstm, {precision}"][0]()[0], GPUS["sm_80"]).kernel
               for precision in ("int16", "fp32")}
    card = CARDS["sm_80"]
    assert isinstance(cheapest(kernels["int16"], card, 4096), Tiled)
    assert not isinstance(cheapest(kernels["int16"], card, 1), Tiled)
    assert not any(isinstance(tactic, Tiled) for tactic in kernels["fp32"].tactics())


def test_a_halo_is_filled_and_nothing_beside_it() -> None:
    runs = (View("uint8", (1, 9), (9, 1), 63), View("uint8", (4, 2), (7, 1), 63), View("uint8", (1, 3), (3, 1), 63))
    problem, memory = HaloFill(runs, 7), [np.full(200, 1, np.uint8) for _ in runs]
    GpuRunner(GPUS["sm_61"]).execute(problem, [], memory, {}, 2)
    for view, found in zip(runs, memory, strict=True):
        places = [n * view.item + i * view.strides[0] + j for n in (0, 1) for i in range(view.shape[0])
                  for j in range(view.shape[1])]
        assert (found[places] == 7).all() and (np.delete(found, places) == 1).all()


def test_what_only_fills_reads_nothing() -> None:
    b = ProgramBuilder(False)
    b.add("max", 0.7, 0.7)
    problem, memory = Pointwise((), dense_view("float32", (3, 5)), b.program(), uniform=True), np.zeros(120, np.uint8)
    GpuRunner(GPUS["sm_61"]).execute(problem, [], [memory], {"program": b.constants}, 2)
    np.testing.assert_array_equal(memory.view(np.float32), np.float32(0.7))


@pytest.mark.parametrize(("boxes", "limit", "least"), [(5, 5, -np.inf), (2100, 40, 0.9)])
def test_the_best_boxes_of_each_class_are_those_of_the_reference(boxes: int, limit: int, least: float) -> None:
    """There are fewer boxes than threads, or several per thread."""
    corners, scores = boxes_and_scores(boxes)
    scores[:, :, 0, 1] = np.nan
    expected, got = chosen(spec_of(boxes, limit), GpuRunner(GPUS["sm_80"]), corners, scores, limit, 0.5, least)
    assert len(expected) > 6
    np.testing.assert_array_equal(got, expected)


# ---- what is wrong is found
PLANTED = {
    "no barrier": (r"bar\.sync[^;]*;", ""),
    "waits for too few copies": (r"(cp\.async\.wait_group\s+)1;", r"\g<1>2;"),
    "copies that nobody commits": (r"cp\.async\.commit_group;", ""),
    "signed pixels": (r"u8\.s8\.s32", "s8.s8.s32"),
    "no rounding": (r"0f4B400000", "0f00000000"),
    "chunks of a row exchanged where they are read": (r"(xor\.b32\s+%r\d+, %r\d+), 32;", r"\1, 16;"),
    "tiles of the wrong rows": (r"(ldmatrix[^;]*\+)1024\]", r"\g<1>2048]"),
    "a pixel too many": (r"setp\.(gt|ge|lt|hs|lo)\.u32\s+(%p\d+), (%r\d+), (%r\d+);", r"setp.ne.s32 \2, \3, -1;"),
    "a tail that is copied whole": (r"(cp\.async[^;]*), 16, %r\d+;", r"\1, 16, 16;"),
    "a store beside its place": (r"(st\.global[^\[]*\[%rd\d+)\]", r"\1+16]"),
    "constants of another channel": (r"(ld\.global[^\[]*v4[^\[]*\[%rd\d+)\]", r"\1+16]"),
    "a load of the wrong width": (r"ld\.global(\.nc)?\.v4\.b32", r"ld.global\1.v2.b32"),
    "copies that wgmma may not see": (r"fence\.proxy\.async[^;]*;", ""),
}


@pytest.mark.parametrize(("what", "change"), PLANTED.items(), ids=PLANTED)
def test_a_planted_fault_is_found(what: str, change: tuple[str, str]) -> None:
    problem, inputs, constants = convolution(cout=64)
    gpu = "sm_90a" if "wgmma" in what else "sm_80"
    way = by(SMALL[gpu], gpu, problem)
    broken = re.sub(*change, text_of(way))
    assert broken != text_of(way), "what is to be broken is not there any more"
    with pytest.raises((Fault, AssertionError)):
        check(way, GpuRunner(GPUS[gpu]), inputs, constants, text=broken)


@pytest.mark.parametrize(("what", "change"), {
    "no barrier": PLANTED["no barrier"],
    "waits for too few copies": (r"(cp\.async\.wait_group\s+)0;", r"\g<1>1;"),
    "copies that nobody commits": PLANTED["copies that nobody commits"],
    "values that are not transposed": (r"x4\.trans", "x4"),
    "keys of the wrong rows": (r"(ldmatrix\S*x4\.shared[^;]*\+)1280\]", r"\g<1>2560]"),
    "copies beside their place": (r"(cp\.async\S* \[%r\d+)\]", r"\1+16]"),
}.items())
def test_a_planted_fault_of_an_attention_is_found(what: str, change: tuple[str, str]) -> None:
    problem, inputs, constants = attention("int8", 70, 150, (64, 32))
    way, *_ = every_way(problem, GPUS["sm_80"])
    broken = re.sub(*change, text_of(way))
    assert broken != text_of(way), "what is to be broken is not there any more"
    with pytest.raises((Fault, AssertionError)):
        check(way, GpuRunner(GPUS["sm_80"]), inputs, constants, text=broken)


@pytest.mark.parametrize(("what", "change"), {
    "no barrier": PLANTED["no barrier"],
    "states whose lower bytes have a sign": (r"s8\.u8\.s32", "s8.s8.s32"),
    "weights whose lower bytes have a sign": (r"u8\.u8\.s32", "s8.u8.s32"),
    "states of other units": (r"(ldmatrix\S*x4\.shared[^;]*\[%r\d+)\+\d+\]", r"\1+16]"),
    "weights of another lane": (r"(ld\.global\S*v4[^\[]*\[%rd\d+)\]", r"\1+16]"),
    "bytes put beside their place": (r"(st\.shared\.b8\s+\[%r\d+\+\d+)2\]", r"\g<1>4]"),
    "an item too many": (r"setp\.(gt|ge|lt|le|hs|lo)\.u32\s+(%p\d+), (%r\d+), (%r\d+);", r"setp.ne.s32 \2, \3, -1;"),
}.items())
def test_a_planted_fault_of_a_recurrent_layer_on_tensor_cores_is_found(what: str, change: tuple[str, str]) -> None:
    problem, inputs, constants = CASES["recurrence, int16"][0]()
    way = Way(way_of(problem, GPUS["sm_80"]).kernel, Tiled(8, 1, 5, 1))
    broken = re.sub(*change, text_of(way))
    assert broken != text_of(way), "what is to be broken is not there any more"
    with pytest.raises((Fault, AssertionError)):
        check(way, GpuRunner(GPUS["sm_80"]), inputs, constants, text=broken)


@pytest.mark.parametrize(("what", "change"), {
    "no barrier": PLANTED["no barrier"],
    "lanes that are asked twice": (r"(shfl\.sync\.bfly\.b32\s+\S+ \S+) 16,", r"\1 8,"),
    "a warp's number in the place of another's": (r"(ld\.shared\S*\s+\S+ )\[shared\+48\]", r"\1[shared+32]"),
    "what every thread stores": (r"setp\.ne\.b32\s+(%p\d+), %r1, 0;", r"setp.ne.b32 \1, %r1, %r1;"),
}.items())
def test_a_planted_fault_of_a_nest_that_a_block_shares_is_found(what: str, change: tuple[str, str]) -> None:
    problem, inputs, constants = CASES["nest of many turns, fp32"][0]()
    *_, way = every_way(problem, GPUS["sm_80"])
    broken = re.sub(*change, text_of(way))
    assert broken != text_of(way), "what is to be broken is not there any more"
    with pytest.raises((Fault, AssertionError)):
        check(way, GpuRunner(GPUS["sm_80"]), inputs, constants, text=broken)


def test_what_is_read_past_a_tensor_is_found() -> None:
    problem, inputs, constants = convolution()
    way, runner = by(SMALL["sm_80"], "sm_80", problem), GpuRunner(GPUS["sm_80"])
    x, residual = ([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in inputs])
    with pytest.raises(Fault, match="outside of what is allocated"):
        runner.execute(way, [x, residual], [np.zeros(problem.y.item * 2, np.uint8)], constants, 2)
