"""Tactics timed inside the network: candidates compute the same, the fastest is chosen and cached."""
from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.zoo.vision.resnet import resnet34
from infer_server.engines.backends.llvm.codegen.isa import best_isa
from infer_server.engines.backends.llvm.kernels.contraction.direct import DirectContraction
from infer_server.engines.backends.llvm.kernels.winograd.winograd import WinogradContraction
from infer_server.engines.backends.llvm.runtime.execution import Arena, run_segment
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.backends.llvm.runtime.segments import Segment
from infer_server.engines.backends.llvm.session import LlvmSession
from infer_server.engines.backends.llvm.tuning import network_timing, tuner
from infer_server.engines.backends.llvm.tuning.candidates import Candidate
from infer_server.engines.backends.llvm.tuning.network_timing import Trial, times_in_network, typical
from infer_server.engines.backends.llvm.tuning.tuner import Estimate, Tuner
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.ir.graph import Graph, Node, TensorType
from infer_server.engines.lowering.calls.calls import FALLBACK_RULES
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.view import Halo, dense_view
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.plan import Buffer, Operand, Step

ITEMS = 2


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Return a small ResNet in INT8, whose sums are exact in any order."""
    builder = Builder(BuildConfig(precision="int8", timing=False))
    model = resnet34(size=32, width=0.25, classes=10, depths=(1, 1))
    floats = builder.graph(model.SerializeToString())
    return builder.stored(floats, dict.fromkeys(builder.edges(floats), (-1.0, 2.0)))


@pytest.fixture(scope="module")
def times_alone(graph: Graph) -> TimingCache:
    cache = TimingCache()
    session(cache).choose(graph, ITEMS)
    return cache


@pytest.fixture
def cache(times_alone: TimingCache) -> TimingCache:
    """Return the timing cache of a network whose kernels were timed alone, so that only trials are left."""
    return deepcopy(times_alone)


def session(cache: TimingCache) -> LlvmSession:
    return LlvmSession(best_isa(detect().features).name, cache, timing=True)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Return a list that collects the trials that run, each as short as possible."""
    found: list[Trial] = []

    def noted(trial: Trial, items: int, progress: Any = None) -> list[Estimate]:
        found.append(trial)
        return times_in_network(trial, items, progress)

    monkeypatch.setattr(network_timing, "SECONDS", 0.0)
    monkeypatch.setattr(network_timing, "MOST_CANDIDATES", (6, 6))
    monkeypatch.setattr(network_timing, "times_in_network", noted)
    return found


def test_every_candidate_of_a_trial_leaves_the_same_bytes(
        graph: Graph, cache: TimingCache, trials: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "NEAR", math.inf)        # whatever they took alone
    judge = session(cache)
    judge.settle(judge.choose(graph, ITEMS))
    plan, candidates, _ = trials[0]
    program = LoadedPlan(plan)
    arena = Arena(program, program.separate_layout)
    arena._bytes[:] = np.random.default_rng(0).integers(0, 64, arena.bytes)      # no float of these is a NaN
    arena.prepare(1)
    for steps in candidates:
        left = []
        for step in steps:
            run_segment(program, arena, Segment(step, step + 1), 1)
            left.append(arena._bytes.copy())
        for ours in left[1:]:
            np.testing.assert_array_equal(ours, left[0], plan.machine.steps[steps[0]].name)
    assert sum(map(len, candidates)) > len(candidates), "or nothing was compared"


def test_a_network_that_runs_for_seconds_is_left_to_times_alone(
        graph: Graph, cache: TimingCache, trials: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_timing, "MOST_RUN", 1e-9)
    judge = session(cache)
    chosen = judge.choose(graph, ITEMS)
    assert judge.settle(chosen).choices == chosen.choices and not trials


def test_a_trial_has_the_constants_that_the_reference_reads(graph: Graph, cache: TimingCache, trials: list[Trial],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FALLBACK_RULES, "Add")
    score, = graph.outputs
    double = TensorType(np.dtype(np.float64), graph.shape(score))
    shift = Node("Add", ("double", "shift"), ("shifted",))
    network = replace(graph, outputs=("shifted",)).rebuild(
        [*graph.nodes, Node("Cast", (score,), ("double",), {"to": "float64"}), shift], {"shift": np.ones(1)},
        {"double": double, "shifted": double})
    judge = session(cache)
    judge.settle(judge.choose(network, ITEMS))
    assert [step.name for step in trials[0].plan.machine.steps if step.fallback and "shift" in step.fallback.inputs]


def test_a_tensor_that_no_call_touches_has_its_place_in_a_trial() -> None:
    """States of an LSTM are an example if only the last one is used: their lifetime starts after the last call."""
    buffers = [Buffer("x", 4, -1, 0), Buffer("hidden", 4, 0, 1), Buffer("unused", 4, 2, 2), Buffer("y", 4, 1, 2)]
    lives = [(buffer.first, buffer.last) for buffer in network_timing.trial_buffers(buffers, [range(3), range(3, 5)])]
    assert lives == [(-1, 2), (0, 4), (5, 5), (3, 5)]


def test_a_second_build_of_the_network_times_nothing_and_chooses_alike(
        graph: Graph, cache: TimingCache, trials: list[Trial]) -> None:
    first, second = ([(choice.symbol, choice.time_us) for choice in judge.settle(judge.choose(graph, ITEMS))
                      .choices.values()] for judge in (session(cache), session(cache)))
    assert len(trials) == 1 and first == second


def test_times_in_one_network_say_nothing_about_another(graph: Graph, cache: TimingCache,
                                                        trials: list[Trial]) -> None:
    shorter = replace(graph, nodes=graph.nodes[:-3], outputs=graph.nodes[-4].outputs)
    for network in (graph, shorter):
        judge = session(cache)
        judge.settle(judge.choose(network, ITEMS))
    assert len(trials) == 2


def test_what_is_faster_inside_the_network_is_taken_though_it_is_slower_alone(
        graph: Graph, cache: TimingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in gives the last candidate of each problem half the time of the others."""
    said: list[Trial] = []

    def times(trial: Trial, items: int, progress: Any = None) -> list[Estimate]:
        said.append(trial)
        return [Estimate(1.0 if step != steps[-1] else 0.5, 1e-6) for steps in trial.candidates for step in steps]

    monkeypatch.setattr(network_timing, "times_in_network", times)
    judge = session(cache)
    alone = judge.choose(graph, ITEMS)
    settled = judge.settle(alone)
    last = {problem: said[0].plan.machine.steps[steps[-1]].symbol
            for steps, problem in zip(said[0].candidates, said[0].problems, strict=True) if problem}
    assert {problem: choice.symbol for problem, choice in settled.choices.items()} == last
    assert any(alone.choices[problem].symbol != symbol for problem, symbol in last.items())


def test_the_speed_of_a_run_is_not_that_of_its_steps() -> None:
    """Steps 1 and 2 are alternatives for one call; every run with step 1 happens to be twice as slow."""
    runs = [{0: 3.0 * speed, 1 + (speed == 1.0): 5.0 * speed, 3: 7.0 * speed} for speed in [2.0, 1.0] * 8]
    cost = typical(runs)
    assert cost[1].value == pytest.approx(cost[2].value)
    assert cost[3].value / cost[0].value == pytest.approx(7 / 3)


def test_a_run_during_which_the_clock_stood_still_says_nothing() -> None:
    runs = [{0: 3.0, 1: 5.0}, {0: 0.0, 1: 0.0}, {0: 3.0, 1: 5.0}]
    assert {step: cost.value for step, cost in typical(runs).items()} == {0: 3.0, 1: 5.0}


def test_a_time_that_scatters_is_less_sure() -> None:
    rng = np.random.default_rng(0)
    runs = [{0: 1.0, 1: float(rng.normal(1.0, 0.1)), 2: 1.0} for _ in range(64)]
    assert 0.1 / 8 < typical(runs)[1].error < 0.1 / 4
    assert Estimate(1.0, 0.03).with_(Estimate(0.9, 0.01)).value == pytest.approx(0.91)


def test_who_reads_many_weights_has_candidates_that_are_far_slower_alone() -> None:
    """Winograd's weights are four times as large: from memory, the direct kernel may be faster."""
    def candidates(cin: int, us_direct: float) -> set[type]:
        x, y = dense_view("uint8", (16, 16, cin)), dense_view("uint8", (14, 14, cin))
        problem = Contraction(x, y, (), EpilogueProgram(), "int8", (3, 3), border=Halo(1, 1, 1, 1), bounded=True)
        isa = best_isa(detect().features)
        judge = Tuner(isa, TimingCache(), "")
        one, other = DirectContraction(problem), WinogradContraction(problem)
        if not other.tactics(isa):
            pytest.skip(f"{isa.name} has no Winograd tactic for {cin} channels")
        judge._alone[problem] = {Candidate(one, one.tactics(isa)[0]): (us_direct,),
                                 Candidate(other, other.tactics(isa)[0]): (100.0,)}
        return {type(candidate.kernel) for candidate in judge.close_candidates(problem, most=6)}

    assert candidates(64, 200.0) == {WinogradContraction}
    assert candidates(64, 104.0) == {WinogradContraction, DirectContraction}
    assert candidates(128, 200.0) == {WinogradContraction, DirectContraction}


def test_a_trial_packs_no_more_constants_than_it_may(graph: Graph, times_alone: TimingCache, trials: list[Trial],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tactic is a candidate here; without spare bytes, only those with the chosen packing remain."""
    monkeypatch.setattr(tuner, "NEAR", math.inf)
    for room in (1 << 30, 0):
        monkeypatch.setattr(network_timing, "MOST_BYTES", room)
        judge = session(deepcopy(times_alone))
        judge.settle(judge.choose(graph, ITEMS))
    packed = [max(len({operands_of(trial.plan.machine.steps[step]) for step in steps}) for steps in trial.candidates)
              for trial in trials]
    assert packed[0] > packed[1] == 1


def operands_of(step: Step) -> tuple[Operand, ...]:
    """Return the constants that the step reads."""
    return tuple(operand for operand in step.operands if operand.constant)
