"""Tests of the table of peaks, per second and per cycle."""
from __future__ import annotations

import math

from benchmarks.peaks import table
from infer_server.engines.plan.roofline import Level, Peaks


def peaks(unit: float) -> Peaks:
    """Return the peaks of a core that multiplies 32 numbers and reads 64 bytes in 1 / `unit` of the time unit."""
    return Peaks("a core", "a target", {"int8": 32 * unit}, (Level("L1", math.inf, 64 * unit),), 3e9)


def test_where_the_machine_counts_cycles_the_figures_of_a_cycle_are_what_it_counted() -> None:
    found = table(peaks(2e9), counted=peaks(1))
    assert "| int8 multiply-accumulates | 64.0 | 32.0 |" in found and "| bytes read from L1 | 128.0 | 64.0 |" in found
    assert "Cycles are counted by the machine." in found


def test_elsewhere_the_measured_clock_divides_and_the_table_says_so() -> None:
    actual = table(peaks(2e9), counted=None)
    assert "| int8 multiply-accumulates | 64.0 | 21.3 |" in actual and "a clock of 3.00 GHz" in actual
