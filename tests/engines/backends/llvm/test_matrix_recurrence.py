"""Recurrent layers on a matrix unit: exact for every batch, tactic and precision, and by vectors for few items."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import AVX512_AMX, AVX512_BF16, AVX512_VNNI
from infer_server.engines.backends.llvm.kernels.kernel import kernels_for
from infer_server.engines.backends.llvm.kernels.recurrent import matrix_tiling
from infer_server.engines.backends.llvm.kernels.recurrent.matrix_tiling import (
    FEWEST_ITEMS,
    FEWEST_OF_PLANES,
    MatrixPanels,
)
from infer_server.engines.backends.llvm.kernels.recurrent.matrix_unit import MatrixUnitRecurrence
from infer_server.engines.backends.llvm.kernels.recurrent.recurrence import RecurrenceKernel
from infer_server.engines.backends.llvm.kernels.recurrent.tiling import Panels
from scripts.testing.recurrence import Case, node_of
from scripts.testing.suite import check
from tests.engines.backends.llvm.emulation import EMULATION
from tests.engines.backends.llvm.jit import runs_here
from tests.engines.backends.llvm.runner import CpuRunner
from tests.engines.backends.llvm.tiles.jobs import counting, kernel_job
from tests.engines.backends.llvm.tiles.trapped import run_trapped
from tests.engines.backends.runners import ALL_COMBINATIONS, rotated

CPU, HERE = CpuRunner(AVX512_AMX), runs_here(AVX512_AMX)
NATIVE = pytest.mark.parametrize("native", [
    False, pytest.param(True, marks=pytest.mark.skipif(not HERE, reason="no tile registers here"))])
TRAPPED = pytest.mark.skipif(not runs_here(AVX512_VNNI), reason="instructions other than tiles need AVX-512 VNNI")
CELLS: dict[str, dict[str, Any]] = {"lstm": {}, "gru": {"cell": "GRU"}, "rnn": {"cell": "RNN"},
                                    "gru, product reset": {"cell": "GRU", "linear_before_reset": 1}}


def check_all(case: Case, native: bool, spec: Any = None) -> None:
    """Compare all tactics, with the matrix unit for every batch, with the reference bit for bit."""
    kernel = MatrixUnitRecurrence(spec or case.spec)
    assert len(kernel.tactics(AVX512_AMX)) > (case.spec.hidden > 16)
    for tactic in kernel.tactics(AVX512_AMX):
        check(kernel, CPU, case.inputs, case.constants, tactic=tactic, pieces=2, native=native)


SIZES = {f"{hidden}-{batch}-{precision}": (hidden, batch, precision)
         for hidden, batch in ((37, 8), (70, 19)) for precision in ("int16", "int8")}


@rotated("attrs, size, emulated", CELLS, SIZES, {"emulated": True, "native": False})
def test_a_cell_equals_its_reference_bit_for_bit(attrs: dict[str, Any], size: tuple[int, int, str],
                                                 emulated: bool) -> None:
    hidden, batch, precision = size
    case = Case(node_of(direction="bidirectional", **attrs), hidden, precision, batch, steps=3)
    check_all(case, HERE and not emulated)


@NATIVE
@pytest.mark.parametrize("precision", ["int16", "int8"])
def test_a_batch_of_any_size_is_multiplied_by_tiles(precision: str, native: bool,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEWEST_ITEMS", "FEWEST_OF_PLANES"):
        monkeypatch.setattr(matrix_tiling, name, 1)
    for number, batch in enumerate((1, 2, 9, 17)):
        if ALL_COMBINATIONS or not HERE or (number + (precision == "int8") + native) % 2:
            check_all(Case(node_of(), 40 + batch, precision, batch, steps=2), native)


@NATIVE
def test_states_that_do_not_fit_take_blocks_of_8_items(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(node_of(), 20, "int16", batch=17, steps=2)
    assert MatrixUnitRecurrence(case.spec).block(AVX512_AMX) == 16
    monkeypatch.setattr(matrix_tiling, "MOST_STATES", 0)
    assert MatrixUnitRecurrence(case.spec).block(AVX512_AMX) == 8
    check_all(case, native)


@NATIVE
@pytest.mark.parametrize("crowded", [None, 3])
def test_a_state_that_is_rounded_by_its_own_range_is_multiplied_as_bytes(crowded: int | None, native: bool) -> None:
    case = Case(node_of(direction="bidirectional"), 37, "int8", batch=11, states=True, rounds=True, steps=3)
    if crowded:
        weights = np.clip(case.constants["weights"], -64, 64)
        weights[:, :, [1, 23, 35]], weights[:, :, [0, 22, 34]] = 127, 100
        case.constants["weights"] = weights
    check_all(case, native, replace(case.spec, crowded=crowded))


@NATIVE
@pytest.mark.parametrize("precision, one", [("int16", 1 << 13), ("int8", 127)])
def test_products_of_the_largest_states_and_weights_are_exact(precision: str, one: int, native: bool) -> None:
    """The first state is 1 or -1. Sums of 7 of the largest weights of 16 bits and 57 bytes stay below 2**31."""
    random, hidden, info = np.random.default_rng(0), 64, np.iinfo(precision)
    case = Case(node_of("RNN"), hidden, precision, batch=16, steps=3)
    weights = random.integers(info.min, info.max, (1, hidden, hidden), endpoint=True)
    weights[:, :2], weights[:, 2:4] = info.max, info.min
    if precision == "int16":
        weights[:, :, 7:] %= 256
    scales = np.full((1, hidden), 1 / (7 * one * float(info.max)), np.float32)
    case.constants |= {"weights": weights.astype(precision), "scales": scales}
    case.inputs[0][:, 0] = 20 * random.choice([-1, 1], (16, hidden))
    check_all(case, native)


@TRAPPED
@pytest.mark.parametrize("precision, fewest, products", [
    ("int8", FEWEST_ITEMS, ["tdpbusd"]), ("int16", FEWEST_OF_PLANES, ["tdpbuud", "tdpbusd", "tdpbsud", "tdpbssd"])])
def test_few_items_are_multiplied_by_vectors(precision: str, fewest: int, products: list[str], tmp_path: Path) -> None:
    """In each of 3 steps a block of items is multiplied by the weights of 4 gates and 2 vectors of units."""
    jobs = []
    for batch in (fewest - 1, fewest, 16):
        case = Case(node_of(), 32, precision, batch, steps=3)
        kernel = MatrixUnitRecurrence(case.spec)
        jobs.append(counting(kernel_job(kernel, AVX512_AMX, kernel.tactics(AVX512_AMX)[0], case.inputs,
                                        case.constants)))
    few, *many = (result.counts for result in run_trapped(jobs, tmp_path))
    assert not few
    for counts in many:
        assert {name: counts[name] for name in counts if name.startswith("tdp")} == dict.fromkeys(products, 3 * 4 * 2)
        assert counts["tilerelease"] == 1 and counts["ldtilecfg"] <= 2


@pytest.mark.parametrize("case", [Case(node_of(), 20), Case(node_of(), 20, "int8", lengths=True)],
                         ids=["floats", "lengths"])
def test_floats_and_items_of_their_own_length_are_multiplied_by_vectors(case: Case) -> None:
    assert not MatrixUnitRecurrence(case.spec).tactics(AVX512_AMX)
    assert RecurrenceKernel(case.spec).tactics(AVX512_AMX)


def test_other_machines_have_no_tactics_of_it() -> None:
    kernel = MatrixUnitRecurrence(Case(node_of(), 20, "int8").spec)
    assert kernel.tactics(AVX512_AMX) and not kernel.tactics(AVX512_BF16)


def test_bytes_of_weights_are_packed_once_and_words_twice() -> None:
    for precision, times in (("int8", 1), ("int16", 2)):
        case = Case(node_of(direction="bidirectional"), 64, precision)
        sizes = [kernel(case.spec).pack(AVX512_AMX, tactic, case.constants)[0].nbytes for kernel, tactic in (
            (RecurrenceKernel, Panels(1)), (MatrixUnitRecurrence, MatrixPanels(1)))]
        assert sizes[1] == times * sizes[0]


@pytest.mark.parametrize("precision", ["int16", "int8"])
def test_without_timing_a_batch_is_multiplied_by_tiles_and_an_item_by_vectors(precision: str) -> None:
    spec = Case(node_of(), 64, precision).spec
    for items, expected in ((1, RecurrenceKernel), (32, MatrixUnitRecurrence)):
        kernels = [kernel for kernel in kernels_for(spec, items) if kernel.tactics(AVX512_AMX)]
        best = min(kernels, key=lambda kernel: kernel.cost(AVX512_AMX, kernel.tactics(AVX512_AMX)[0]))
        assert type(best) is expected


@pytest.mark.parametrize("name, other, hidden", [("tdpbuud", "tdpbusd", 17), ("tdpbusd", "tdpbuud", 18),
                                                 ("tdpbsud", "tdpbssd", 19), ("tdpbssd", "tdpbsud", 20)])
def test_a_wrong_sign_would_be_seen(name: str, other: str, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(node_of("RNN"), hidden, "int16", batch=8, steps=2)
    wrong = EMULATION[f"llvm.x86.{other}"].replace(other, name)
    monkeypatch.setattr("tests.engines.backends.llvm.runner.EMULATION", EMULATION | {f"llvm.x86.{name}": wrong})
    with pytest.raises(AssertionError):
        check(MatrixUnitRecurrence(case.spec), CPU, case.inputs, case.constants, native=False)
