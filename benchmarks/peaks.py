"""What one core of this machine does at best: the roof that profiles and ratios are read under.

    python -m benchmarks.peaks --write

Where the machine counts cycles, everything is shown for a cycle as well: that figure belongs to the core, not to the
clock of the moment.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.measure.cycles import Counter
from benchmarks.reports.document import Cell, machine, markdown_table, write_section
from engines.backends import backend_of

SECTION = "peaks"


def section(counter: Counter) -> str:
    """The measured peaks as a section of docs/benchmarks.md."""
    counts, seconds = counter.read(), time.process_time()
    peaks = backend_of("").peaks()
    hertz = (counter.read() - counts) / (time.process_time() - seconds)
    rates = [(f"{name} multiply-accumulates", rate) for name, rate in peaks.macs_per_second.items()]
    rates += [(f"bytes read from {level.name}", level.bytes_per_second) for level in peaks.levels]
    rows: list[list[Cell]] = [[what, f"{rate / 1e9:.1f}"] for what, rate in rates]
    header = ["of one core", "10^9 a second"]
    if counter.unit == "cycles":
        header.append(f"a cycle, at {hertz / 1e9:.2f} GHz")
        rows = [[*row, f"{rate / hertz:.1f}"] for row, (_, rate) in zip(rows, rates, strict=True)]
    return ("### Measured peaks\n\n`python -m benchmarks.peaks --write`\n\n"
            f"On {machine()}, kernels for {peaks.target}. "
            "An arithmetic without instructions of its own is\ncomputed in float32.\n\n"
            f"{markdown_table(header, rows)}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks.peaks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args(arguments)
    text = section(Counter())
    print(text)
    if options.write:
        write_section(SECTION, text)


if __name__ == "__main__":
    main(sys.argv[1:])
