"""Tests of the lower bound on a step's time."""
from __future__ import annotations

import math

import pytest

from infer_server.engines.plan.plan import MachinePart, Plan, Step
from infer_server.engines.plan.roofline import Level, Peaks, bound

PEAKS = Peaks("a core", "a target", {"int8": 100.0, "fp32": 10.0},
              (Level("L1", 100, 50.0), Level("L2", 1000, 20.0), Level("DRAM", math.inf, 1.0)))


def step(**facts: object) -> Step:
    return Step(**{"symbol": "k", "operands": (), "rows_per_item": 1, "precision": "int8", **facts})    # type: ignore[arg-type]


def plan(*steps: Step) -> Plan:
    return Plan("m", "int8", 4, (), (), MachinePart("llvm", "t", (), (), (), steps))


def test_what_computes_more_than_it_moves_is_bound_by_its_own_arithmetic() -> None:
    heavy = step(macs=1000, bytes=50)
    assert bound(heavy, plan(heavy), 1, PEAKS).seconds == 10.0
    assert bound(heavy, plan(heavy), 1, PEAKS).limit == "int8"
    assert bound(step(macs=1000, bytes=50, precision="fp32"), plan(), 1, PEAKS).seconds == 100.0


def test_activations_come_from_the_smallest_level_that_holds_them() -> None:
    for size, name, seconds in ((100, "L1", 2.0), (101, "L2", 101 / 20), (1001, "DRAM", 1001.0)):
        light = step(bytes=size)
        found = bound(light, plan(light), 1, PEAKS)
        assert (found.limit, found.seconds) == (name, seconds)


def test_weights_come_from_the_level_that_holds_those_of_the_whole_network() -> None:
    small, large = (step(macs=1, bytes=size, constant_bytes=size) for size in (60, 960))
    assert bound(small, plan(small), 1, PEAKS).limit == "L1"
    assert bound(small, plan(small, large), 1, PEAKS).limit == "DRAM"


def test_a_batch_multiplies_all_but_the_weights() -> None:
    both = step(macs=10, bytes=60, constant_bytes=20)
    found = bound(both, plan(both), 2, PEAKS)
    assert found.compute == 0.2 and found.memory == pytest.approx(80 / 50 + 20 / 50)


def test_a_step_that_does_not_depend_on_the_batch_is_run_once() -> None:
    once = step(macs=10, bytes=50, rows_per_item=0, rows=3)
    assert bound(once, plan(once), 4, PEAKS) == bound(once, plan(once), 1, PEAKS)


def test_a_fallback_has_no_bound() -> None:
    assert bound(step(symbol="", precision="fp32"), plan(), 4, PEAKS).seconds == 0


def test_of_a_table_only_the_rows_that_are_looked_up_are_read() -> None:
    lookup, weights = step(bytes=1060, constant_bytes=1000), step(macs=1, bytes=50, constant_bytes=40)
    assert bound(lookup, plan(lookup), 1, PEAKS).memory == 60 / 50 + 60 / 50
    assert bound(lookup, plan(lookup), 2, PEAKS).memory == 120 / 20 + 120 / 20
    assert bound(weights, plan(lookup, weights), 1, PEAKS).memory == 10 / 50 + 40 / 50


def test_of_two_measurements_of_a_core_the_better_figures_count() -> None:
    other = Peaks("a core", "a target", {"int8": 90.0, "fp32": 11.0},
                  (Level("L1", 100, 60.0), Level("L2", 1000, 10.0), Level("DRAM", math.inf, 2.0)), 3e9)
    both = PEAKS.or_better(other)
    assert both.macs_per_second == {"int8": 100.0, "fp32": 11.0} and both.hertz == 3e9
    assert [level.bytes_per_second for level in both.levels] == [60.0, 20.0, 2.0]
    assert PEAKS.or_better(PEAKS).hertz is None
