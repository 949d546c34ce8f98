"""The README's picture: eight models in INT8 against two peers, drawn from a file of results.

    python -m benchmarks.reports.picture            # docs/benchmarks/results/peers-avx512.json -> eight-models.png
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.results import Case
from benchmarks.reports.chart import BAR, COLOURS
from benchmarks.reports.document import PAGES, machine
from benchmarks.runtimes.runtimes import OPENVINO, ORT, OURS, versions

RESULTS = PAGES / "results" / "peers-avx512.json"
PICTURE = PAGES / "eight-models.png"
DOTS_PER_INCH = 100
HEIGHT, WIDTH = 390, 860        # pixels


def write_summary(cases: Sequence[Case], command: str, path: Path) -> None:
    """Write the costs and ratios of each case's fastest builds as JSON, with the command and the machine."""
    rows = [{"model": case.model, "precision": case.precision, "batch": case.batch, "threads": case.threads,
             "cost": case.ours.cost, "unit": case.unit, "peers": _peers(case)} for case in cases]
    packages = ", ".join(f"{package} {version}" for package, version in versions().items())
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {"command": command, "machine": machine(), "versions": packages, "cases": rows}
    path.write_text(json.dumps(summary, indent=1) + "\n")


def _peers(case: Case) -> dict[str, dict[str, Any]]:
    """Return the fastest build of each peer that ran."""
    peers = {}
    for runtime in (OPENVINO, ORT):
        if (row := case.fastest(runtime)) and (ratio := case.ratio(row)):
            peers[runtime] = {"cost": row.cost, "build": row.build, "ratio": ratio.median, "low": ratio.low,
                              "high": ratio.high}
    return peers


def write_picture(results: Path, path: Path, precision: str = "int8", batch: int = 1) -> None:
    """Draw a pair of bars for each model: the peer's time over ours, with quartiles."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    cases = [case for case in json.loads(results.read_text())["cases"]
             if (case["precision"], case["batch"], case["threads"]) == (precision, batch, 1)]
    figure = Figure(figsize=(WIDTH / DOTS_PER_INCH, HEIGHT / DOTS_PER_INCH), layout="constrained")
    axes = figure.subplots()
    for side, runtime in enumerate((OPENVINO, ORT)):
        shown = [(at + (side - 0.5) * BAR, case["peers"][runtime]) for at, case in enumerate(cases)
                 if runtime in case["peers"]]
        rows, ratios = [row for row, _ in shown], [peer["ratio"] for _, peer in shown]
        axes.barh(rows, ratios, BAR, label=runtime, color=COLOURS[runtime])
        for row, peer in shown:
            axes.text(peer["high"] + 0.05, row, f"{peer['ratio']:.2f}", fontsize=8, verticalalignment="center")
        axes.hlines(rows, [peer["low"] for _, peer in shown], [peer["high"] for _, peer in shown], color="black")
    axes.axvline(1, color="black", linestyle="--", linewidth=1, label=OURS)
    axes.set_yticks(range(len(cases)), [case["model"].replace("_random", "") for case in cases])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"time of the peer's fastest build / {OURS}'s: {precision.upper()}, batch {batch}, one thread")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE.json")
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE.png")
    options = parser.parse_args(arguments)
    write_picture(options.results, options.output)


if __name__ == "__main__":
    main()
