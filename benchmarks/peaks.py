"""Measurement of the peak rates of one core, the roofline for profiles and ratios.

    python -m benchmarks.peaks --write

Rates are also shown for a cycle, which is independent of the current clock frequency. Cycles are counted if the machine
permits it; otherwise the clock frequency is measured as well.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.measure.cycles import Counter
from benchmarks.reports.document import machine, markdown_table, write_section
from infer_server.engines.backends.llvm.tuning.peaks import measure_peaks
from infer_server.engines.plan.roofline import Peaks

SECTION = "peaks"


def section(counter: Counter) -> str:
    """Measure the peaks and return a section of docs/benchmarks."""
    return table(measure_peaks(), measure_peaks(counter.read) if counter.unit == "cycles" else None)


def table(peaks: Peaks, counted: Peaks | None) -> str:
    """Return the section for the peaks. counted: peaks per cycle, or None if the machine has no cycle counter."""
    rates = _rates(peaks)
    if counted:
        each, how = _rates(counted), "counted by the machine"
    else:
        assert peaks.hertz is not None
        each = {name: rate / peaks.hertz for name, rate in rates.items()}
        how = f"those of a clock of {peaks.hertz / 1e9:.2f} GHz, measured by a chain of additions"
    rows = [(name, f"{rate / 1e9:.1f}", f"{each[name]:.1f}") for name, rate in rates.items()]
    return ("`python -m benchmarks.peaks --write`\n\n"
            f"On {machine()}, kernels for {peaks.target}. "
            f"An arithmetic without instructions of its own is\ncomputed in float32. Cycles are {how}.\n\n"
            f"{markdown_table(('of one core', '10^9 a second', 'a cycle'), rows)}")


def _rates(peaks: Peaks) -> dict[str, float]:
    """Return the rate of each quantity per unit of the clock."""
    macs = {f"{name} multiply-accumulates": rate for name, rate in peaks.macs_per_second.items()}
    return macs | {f"bytes read from {level.name}": level.bytes_per_second for level in peaks.levels}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks.peaks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks")
    options = parser.parse_args(arguments)
    text = section(Counter())
    print(text)
    if options.write:
        write_section(SECTION, text)


if __name__ == "__main__":
    main(sys.argv[1:])
