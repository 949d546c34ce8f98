"""Leave each model out when choosing the constants of the calibration search.

    python -m benchmarks.search MODEL.onnx --items MODEL.npz --results search.json      # a run for each model and draw
    python -m benchmarks.search --results search.json --write                           # the table, into the docs

An .npz file of items has an array for each input with the items on the leading axis: 64 are for calibration, the others
are unseen.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.reports.document import PAGES, markdown_table, write_section
from benchmarks.search.left_out import CONSTANTS, LeftOut, leave_one_out
from benchmarks.search.trials import SearchRun, record

SECTION, UNSEEN = "left-out", 96
HEADER = ("constant", "value", "model left out", "the others choose", "loss dB", "loss of the value dB")


def read_runs(path: Path) -> list[SearchRun]:
    """Return the runs of a file of results; none if there is no file."""
    return [SearchRun.of(run) for run in json.loads(path.read_text())] if path.exists() else []


def write_runs(runs: Iterable[SearchRun], path: Path) -> None:
    """Write runs as JSON, a line for each."""
    path.write_text("[\n" + ",\n".join(json.dumps(run.as_json()) for run in runs) + "\n]\n")


def table(results: Sequence[LeftOut]) -> str:
    """Return the table of the constants, a row for each model left out."""
    own = {constant.name: constant.own for constant in CONSTANTS}
    return markdown_table(HEADER, [(one.constant, own[one.constant], one.model, one.chosen, f"{one.loss:.2f}",
                                    f"{one.own_loss:.2f}") for one in results])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--items", type=Path, metavar="FILE.npz", help="calibration and unseen items of the model")
    parser.add_argument("--draw", type=int, default=0, help="seed of the calibration items (default 0: the first ones)")
    parser.add_argument("--unseen", type=int, default=UNSEEN, help=f"most unseen items (default {UNSEEN})")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE.json", help="runs, extended by this one")
    parser.add_argument("--write", action="store_true", help="write results and table to docs/benchmarks")
    options = parser.parse_args()
    runs = read_runs(options.results)
    if options.model:
        if options.items is None:
            parser.error("a model needs --items")
        run = record(options.model, options.items, options.draw, options.unseen)
        runs = [*(one for one in runs if (one.model, one.draw) != (run.model, run.draw)), run]
        write_runs(runs, options.results)
    text = table(leave_one_out(runs, CONSTANTS))
    print(text)
    if options.write:
        write_runs(runs, PAGES / "trials" / "search.json")
        write_section(SECTION, f"`python -m benchmarks.search --results search.json --write`\n\n{text}")


if __name__ == "__main__":
    main()
