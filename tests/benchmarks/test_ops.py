"""Tests of benchmarks.ops: DeepBench's problems as models, the measurements left to do, and the report."""
from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from onnx import checker, shape_inference

from benchmarks import ops
from benchmarks.deepbench import CLASSES, CONVOLUTION, PRODUCT, RECURRENT, SPARSE, problems
from benchmarks.measure import measuring
from benchmarks.measure.cases import hopeless
from benchmarks.measure.measuring import interleaved
from benchmarks.measure.results import Case, Row
from benchmarks.reports.ops_report import every_case, report, slower, worklist
from benchmarks.runtimes.builds import Build
from benchmarks.runtimes.runtimes import OPENVINO, ORT, OURS

PROBLEMS = {problem.name: problem for problem in problems()}
CHOSEN = {"gemm-35x700x2048": (700, 35), "gemm-7680x1x2560-0.95": (1, 7680),
          "conv-1x1x161x700-32x5x20-pad0x0-stride2x2": (1, 32, 79, 341),
          "conv-2x2048x7x7-512x1x1-pad3x3-stride2x2": (2, 512, 7, 7),
          "lstm-512-batch2-steps25": (25, 1, 2, 512), "gru-512-batch4-steps1": (1, 1, 4, 512),
          "vanilla-64-batch1-steps96": (96, 1, 1, 64)}


def case(name: str, openvino: float, ort: float, ours: float = 1.0) -> Case:
    costs = {OURS: ours, OPENVINO: openvino, ORT: ort}
    return Case(name, "fp32", 1, 1, "ms", tuple(Row(runtime, "fp32", (cost,) * 3) for runtime, cost in costs.items()))


def test_every_problem_of_the_inference_sets_is_there_once() -> None:
    kinds = Counter(problem.kind for problem in PROBLEMS.values())
    assert kinds == {PRODUCT: 84, SPARSE: 24, CONVOLUTION: 103, RECURRENT: 71} and set(kinds) == set(CLASSES)
    assert len(problems()) == len(PROBLEMS)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_problem_is_a_valid_model_of_its_size(name: str) -> None:
    problem = PROBLEMS[name]
    model = problem.model(np.random.default_rng(0))
    checker.check_model(model, full_check=True)
    y, = shape_inference.infer_shapes(model, strict_mode=True).graph.output
    assert tuple(dim.dim_value for dim in y.type.tensor_type.shape.dim) == CHOSEN[name]
    assert model.graph.node[0].op_type == problem.operator
    if problem.kind != RECURRENT:
        channels = CHOSEN[name][1]
        assert problem.macs == np.prod(CHOSEN[name]) * problem.weight_elements // channels


def test_a_sparse_product_has_as_many_zeros_as_it_says() -> None:
    weights, = PROBLEMS["gemm-7680x1x2560-0.95"].weights(np.random.default_rng(0))
    assert np.mean(weights == 0) == pytest.approx(0.95, abs=0.01)


def test_only_what_no_result_has_is_measured_and_only_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def measured(problem, precision, *others):
        requested.append(f"{problem.name}, {precision}")
        return case(problem.name, 1, 1)

    monkeypatch.setattr(ops, "measured", measured)
    options = ops.parse(["--class", "recurrent", "--match", "vanilla"])
    known = [case("vanilla-64-batch1-steps96", 1, 1)]
    assert len(list(ops.measure(options, measuring.WallClock(), known))) == len(requested) == 3
    assert "vanilla-64-batch1-steps96, fp32" not in requested and "vanilla-64-batch1-steps96, int8" in requested
    options.minutes = 0
    assert not list(ops.measure(options, measuring.WallClock(), known))


def test_an_unknown_class_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ops.parse(["--class", "recurent"])
    assert "recurent: choose from product" in capsys.readouterr().err


def test_the_worklist_has_what_either_peer_does_faster_and_what_failed() -> None:
    failed = Case("gemm-512x1x512", "fp32", 1, 1, "ms", (Row(OURS, "fp32", failure="no"), Row(ORT, "fp32", (1.0,) * 3)))
    fast, slow = case("gemm-35x700x2048", 2, 3), case("lstm-512-batch2-steps25", 2, 0.5)
    assert slower([slow, fast, failed]) == [failed, slow]
    text = worklist([slow, fast, failed])
    assert "Slower than a peer: 2 of 3 cases." in text
    assert "gemm-35x700x2048" not in text and "gemm-35x700x2048" in every_case([fast])
    assert "| recurrent | fp32 | 1 | 2.00 | 2.00 | 0 | 0.50 | 0.50 | 1 |" in report([slow, fast, failed])


def test_a_build_that_a_first_turn_shows_to_be_slow_takes_no_more() -> None:
    fast, slow, other = (Build(runtime, name, Path()) for runtime, name in ((ORT, "a"), (ORT, "b"), (OURS, "c")))
    assert hopeless({fast: [1.0], slow: [2.0], other: [9.0]}) == {slow: 2.0}


def test_a_long_call_is_not_repeated_to_warm_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LONG_SECONDS", 0)
    calls: list[str] = []
    interleaved(measuring.WallClock(), {"long": lambda: calls.append("long")}, 0, fewest=2)
    assert calls == ["long", "long"]
    assert interleaved(measuring.WallClock(), {}, 0) == {}
