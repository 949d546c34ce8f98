"""The way back from packed weights: right for every packing it is found for, and not found for others."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from engines.backends.llvm import unpacking
from engines.backends.llvm.codegen.isa import AVX2, AVX512_VNNI, Isa
from engines.backends.llvm.kernels.contraction.contraction import Contraction
from engines.backends.llvm.kernels.depthwise.depthwise import Depthwise
from engines.backends.llvm.kernels.kernel import KernelSpec
from engines.backends.llvm.kernels.recurrent.cells import Cell, Stage
from engines.backends.llvm.kernels.recurrent.recurrence import Recurrence
from engines.backends.llvm.unpacking import PackingFinder
from engines.lowering.epilogue.program import ProgramBuilder
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import dense_view
from engines.plan.packed import Packing, Picked
from tests.engines.backends.harness import EVERY_ISA, kernel_of

STORED = {"int8": "int8", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def spec_of(precision: str, channels: int, couts: int, groups: int = 1) -> Any:
    """A 3x2 convolution of images of 5x6 pixels; depthwise where it has as many groups as channels."""
    dtype = "uint8" if precision == "int8" else STORED[precision]
    x, y = dense_view(dtype, (5, 6, channels)), dense_view(dtype, (3, 5, couts))
    builder = ProgramBuilder(True)
    views = x, y, (), builder.program(builder.accumulator), precision, (3, 2)
    return Depthwise(*views) if groups == channels else Contraction(*views, groups=groups)


def weights_of(spec: Any, precision: str, shape: tuple[int, ...]) -> Array:
    random = np.random.default_rng(0)
    if precision == "int8":
        return random.integers(-127, 128, shape).astype(np.int8)
    return random.standard_normal(shape).astype(np.float32)


@EVERY_ISA
@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize(("channels", "couts", "groups"), [(7, 5, 1), (3, 150, 1), (8, 140, 2), (70, 70, 70)])
def test_every_weight_is_found_where_it_was_packed(isa: Isa, precision: str, channels: int, couts: int,
                                                   groups: int) -> None:
    spec = spec_of(precision, channels, couts, groups)
    weights = weights_of(spec, precision, (couts, channels // groups, 3, 2))
    constants = {"weights": weights, "program": []}
    finder = PackingFinder(isa)
    for tactic in spec.tactics(isa):
        packed = spec.pack(isa, tactic, constants)
        found = finder.find(kernel_of(spec), tactic, constants, "weights", packed, rounded=True)
        assert found is not None
        again = found.packing.take([packed[which] for which in found.which], found.stored).astype(weights.dtype)
        assert [a.tobytes() for a in spec.pack(isa, tactic, {**constants, "weights": again.reshape(weights.shape)})] \
            == [a.tobytes() for a in packed]


@pytest.mark.parametrize(("columns", "short"), [(6, True), (8000, False)])
def test_paired_weights_are_found_by_short_places_and_by_long_ones(columns: int, short: bool) -> None:
    """Where a row of the image is longer than a short offset reaches, places are kept as they are read."""
    isa, near = AVX2, spec_of("int8", 8, 20)
    spec = replace(near, x=dense_view("uint8", (5, columns, 8)), y=dense_view("uint8", (3, columns - 1, 20)))
    constants = {"weights": weights_of(spec, "int8", (20, 8, 3, 2)), "program": []}
    tactic = next(tactic for tactic in spec.tactics(isa) if tactic.paired)
    packed = spec.pack(isa, tactic, constants)
    found = PackingFinder(isa).find(kernel_of(spec), tactic, constants, "weights", packed, rounded=True)
    assert found is not None and isinstance(found.packing, Picked) and found.packing.short == short
    assert bool(spec.made(isa, tactic)) == short


def test_rounded_weights_are_refused_where_the_graph_needs_them_as_they_are() -> None:
    isa, spec = AVX512_VNNI, spec_of("bf16", 8, 16)
    constants = {"weights": weights_of(spec, "bf16", (16, 8, 3, 2)), "program": []}
    tactic = spec.tactics(isa)[0]
    packed = spec.pack(isa, tactic, constants)
    assert PackingFinder(isa).find(kernel_of(spec), tactic, constants, "weights", packed, rounded=False) is None
    assert PackingFinder(isa).find(kernel_of(spec), tactic, constants, "weights", packed, rounded=True) is not None


@dataclass(frozen=True)
class Lossy(Contraction):
    """Keeps what `keep` says of the weights."""
    keep: str = "all"

    def pack(self, isa: Isa, tactic: Any, constants: Any) -> tuple[Array, Array]:
        weights, program = super().pack(isa, tactic, constants)
        changed = {"halves": weights[:len(weights) // 2], "squares": weights.astype(np.int16) ** 2,
                   "sums": np.cumsum(weights, dtype=np.int32), "all": weights}[self.keep]
        return changed, program


@pytest.mark.parametrize(("keep", "there"), [("all", True), ("halves", False), ("squares", False), ("sums", False)])
def test_a_packing_that_does_not_keep_the_weights_has_no_way_back(keep: str, there: bool) -> None:
    isa, plain = AVX512_VNNI, spec_of("int8", 8, 32)
    spec: KernelSpec = Lossy(plain.x, plain.y, (), plain.program, "int8", plain.taps, keep=keep)
    constants = {"weights": weights_of(spec, "int8", (32, 8, 3, 2)), "program": []}
    tactic = spec.tactics(isa)[0]
    packed = spec.pack(isa, tactic, constants)
    assert (PackingFinder(isa).find(kernel_of(spec), tactic, constants, "weights", packed, True) is not None) == there
    damaged = (packed[0].copy(), packed[1])
    damaged[0][3] ^= 1      # the check is of these very weights
    assert PackingFinder(isa).find(kernel_of(spec), tactic, constants, "weights", damaged, True) is None


@EVERY_ISA
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent_weights_are_a_matrix_of_units(directions: int, isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their leading axis is the directions: with these alone as rows, the way back would be as long as the weights."""
    monkeypatch.setattr(unpacking, "MOST_COLUMNS", 100)
    gates, y = (dense_view("float32", (5, directions * width)) for width in (80, 20))
    cell = Cell((Stage((0, 1, 2, 3), 0, ()),), 1, 0)
    spec = Recurrence(gates, 20, (cell,) * directions, (False,) * directions, y, (None,), (None,))
    weights = weights_of(spec, "fp32", (directions, 80, 20))
    constants, tactic = {"weights": weights, "units": []}, spec.tactics(isa)[0]
    packed = spec.pack(isa, tactic, constants)
    found = PackingFinder(isa).find(kernel_of(spec), tactic, constants, "weights", packed, rounded=False)
    assert found is not None and isinstance(found.packing, Packing)
    assert (len(found.packing.starts), len(found.packing.steps[0])) == (directions * 80, 20)
    np.testing.assert_array_equal(found.packing.take([packed[which] for which in found.which], found.stored),
                                  weights.reshape(-1, 20))
