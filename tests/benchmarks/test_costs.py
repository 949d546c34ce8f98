"""Tests of benchmarks.costs: the loss of choosing by cost, and the ratios of time to cost."""
from __future__ import annotations

import pytest

from benchmarks.costs import loss, ratios
from infer_server.engines.backends.llvm.codegen.isa import AVX2
from infer_server.engines.backends.llvm.kernels.contraction.direct import DirectContraction
from infer_server.engines.backends.llvm.tuning.candidates import Candidate
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.view import dense_view


def candidates(rows: int) -> list[Candidate]:
    """Return two candidates for a product, the cheaper one first."""
    x, y = (dense_view("uint8", (1, rows, n)) for n in (64, 128))
    kernel = DirectContraction(Contraction(x, y, (), EpilogueProgram(), "int8"))
    return sorted((Candidate(kernel, tactic) for tactic in kernel.tactics(AVX2)), key=cost)[:2]


def cost(one: Candidate) -> float:
    cycles: float = one.kernel.cost(AVX2, one.tactic)
    return cycles


def test_the_loss_is_what_the_kernels_of_least_cost_take_beyond_the_fastest_each_as_often_as_it_runs() -> None:
    (a, b), (c, d) = candidates(32), candidates(64)
    actual = {a.kernel.problem: {a: 10.0, b: 8.0}, c.kernel.problem: {c: 4.0, d: 5.0}}
    assert loss(AVX2, actual, {a.kernel.problem: 3, c.kernel.problem: 1}) == pytest.approx(34 / 28 - 1)
    assert loss(AVX2, actual, {a.kernel.problem: 0, c.kernel.problem: 1}) == 0


def test_times_are_compared_with_costs_in_cycles_but_for_those_far_from_the_fastest() -> None:
    a, b = candidates(32)
    actual = {a.kernel.problem: {a: cost(a) / 1000, b: cost(b) / 100}}
    assert ratios(AVX2, [actual], 2e9) == {"DirectContraction": [pytest.approx(2.0)]}
