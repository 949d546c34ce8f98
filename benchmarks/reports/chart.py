"""Chart of a summary: the peers' time relative to ours in each case."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure.results import Case
from benchmarks.runtimes.runtimes import OPENVINO, ORT, OURS

BAR = 0.38      # height of a bar; a case has height 1
COLOURS = {OPENVINO: "tab:blue", ORT: "tab:orange"}


def write_chart(cases: Sequence[Case], path: Path) -> None:
    """Write a PNG of a bar for each case and peer, with quartiles as lines; a peer left of 1 is faster than ours."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(9, 1.2 + 0.5 * len(cases)), layout="constrained")
    axes = figure.subplots()
    for side, runtime in enumerate((OPENVINO, ORT)):
        ratios = [(at, ratio) for at, case in enumerate(cases)
                  if (row := case.fastest(runtime)) and (ratio := case.ratio(row))]
        positions = [at + (side - 0.5) * BAR for at, _ in ratios]
        axes.barh(positions, [ratio.median for _, ratio in ratios], BAR, label=runtime, color=COLOURS[runtime])
        axes.hlines(positions, [ratio.low for _, ratio in ratios], [ratio.high for _, ratio in ratios], color="black")
    axes.axvline(1, color="black", linestyle="--", linewidth=1, label=OURS)
    axes.set_yticks(range(len(cases)), [f"{case.model}, {case.precision}, batch {case.batch}, {case.threads} thr."
                                        for case in cases])
    axes.invert_yaxis()
    axes.set_xlabel(f"time of the peer's fastest build / time of {OURS}")
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
