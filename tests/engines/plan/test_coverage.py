"""Tests of the build's report on steps that no kernel runs."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from infer_server.engines.plan.coverage import ESTIMATED, PARTLY, TIMED, coverage_of
from infer_server.engines.plan.plan import (
    Fallback,
    MachinePart,
    OpenOptions,
    OpenPart,
    Plan,
    ProgramPart,
    Step,
    TensorView,
)
from infer_server.engines.plan.program import Instruction, Region


def kernel(name: str, **facts: object) -> Step:
    return Step(**{"symbol": "k", "operands": (), "rows_per_item": 1, "name": name, **facts})    # type: ignore[arg-type]


def reference(name: str, op: str, reason: str, time_us: float = 0.0, **node: object) -> Step:
    view = TensorView("y", "float32", (1000,), 0, 0, (4,), 4000)
    return kernel(name, symbol="", fallback=Fallback({"op": op, **node}, (view, "table"), (view,)), reason=reason,
                  time_us=time_us)


def plan(*steps: Step, **facts: object) -> Plan:
    machine = MachinePart("llvm", "t", (), (), (), steps, code=(b"code",))
    return Plan(**{"name": "m", "precision": "fp32", "max_batch": 4, "inputs": (), "outputs": (), "machine": machine,
                   "weights": {"table": np.zeros(500, np.float32)}, **facts})                    # type: ignore[arg-type]


NMS, UNIQUE = "'{}' is read by NonMaxSuppression", "no kernel for Unique"


def test_a_plan_of_kernels_says_so_in_one_line() -> None:
    halo = kernel("halo", tactic="halo_fill: default", time_us=1.0)
    found = coverage_of(plan(kernel("a", time_us=3.0), halo))
    assert found.line == "coverage: 1 of 1 steps compiled, 0 by reference"
    assert found.reference_share == 0 and not found.reasons


def test_steps_by_reference_count_by_the_time_that_they_took_and_are_told_by_operator() -> None:
    fused = reference("u", "Fused", UNIQUE, 25.0, body=[{"op": "onnx.Unique"}, {"op": "Relu"}])
    found = coverage_of(plan(kernel("a", time_us=50.0), reference("n1", "NonMaxSuppression", NMS.format("x"), 10.0),
                             fused, reference("n2", "NonMaxSuppression", NMS.format("y"), 15.0)))
    assert found.line == "coverage: 1 of 4 steps compiled (50.0 % of the time), 3 by reference (50.0 %); " + TIMED
    assert found.reasons.splitlines() == [f"  NonMaxSuppression, 25.0 %: {NMS.format('x')} ('n1', 'n2')",
                                          f"  Unique, 25.0 %: {UNIQUE} ('u')"]


def test_without_times_the_shares_are_those_of_what_steps_move_and_multiply() -> None:
    untimed = coverage_of(plan(kernel("a", macs=2_000_000), reference("u", "Unique", UNIQUE)))
    assert untimed.kernels_us == 100.0 and untimed.by_reference[0].time_us == 50 + (4000 + 4000 + 2000) / 500
    assert untimed.basis == ESTIMATED
    assert coverage_of(plan(kernel("a", time_us=9.0), reference("u", "Unique", UNIQUE))).basis == PARTLY


def test_all_specialisations_of_a_plan_with_open_extents_count() -> None:
    other = plan(kernel("a", time_us=5.0), reference("u", "Unique", UNIQUE, 5.0), extents={"T": 9})
    part = OpenPart((), (), (), OpenOptions("fp32"), others=(other,))
    found = coverage_of(replace(plan(kernel("a", time_us=10.0), extents={"T": 7}), open=part))
    assert (found.compiled, found.specialised, len(found.by_reference)) == (0, 2, 1)
    assert found.line.startswith("coverage: 2 of 3 steps specialised for T=7; T=9 (75.0 % of the time), 1 by reference")


def test_a_plan_without_code_runs_by_reference_throughout() -> None:
    numpy = plan(kernel("a")).with_machine(code=(), target="numpy")
    assert coverage_of(numpy).by_reference[0].reason == "nothing is compiled for the target 'numpy'"


def test_what_the_host_runs_between_the_segments_of_a_program_is_by_reference() -> None:
    kept = Instruction("NonMaxSuppression", "nms", ("x",), ("y",))
    branch = Instruction("If", "if", ("y",), ("z",), regions=(Region((), ("z",), (kept,)),))
    main = Region(("x",), ("z",), (Instruction("", "segment", ("x",), ("x1",), segment=0), kept, branch))
    found = coverage_of(plan(program=ProgramPart(main, OpenOptions("fp32"))))
    assert [step.node for step in found.by_reference] == ["nms", "nms"] and found.basis == ESTIMATED
    assert "NonMaxSuppression, 100.0 %: the host evaluates it" in found.reasons
