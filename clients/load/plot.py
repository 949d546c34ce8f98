"""A load test as a PNG: latency over throughput, the parts of latency, and executed batches. Needs matplotlib."""
from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer_server.clients.errors import ClientError
from infer_server.clients.load.generator import LoadLevel
from infer_server.clients.load.report import Report
from infer_server.clients.load.schedule import Closed

_PERCENTILES = {"p50": "#4C78A8", "p99": "#E45756"}
_PARTS = {"compute": "#54A24B", "queue": "#EECA3B", "network": "#9D9DA1", "client": "#B279A2"}
_BATCHES = ("#4C78A8", "#F58518")
_MAX_AREA = 320                     # points, of a batch size that all executions had


def require_matplotlib() -> None:
    """Raise ClientError if matplotlib is not installed. Called before a test starts."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ClientError("--plot needs matplotlib: pip install 'infer-server[plot]', or use --csv and plot it "
                          "elsewhere")


def write_plot(report: Report, path: Path) -> None:
    """Write a PNG with any suffix of `path`; a second server's lines are dashed, its bars hatched."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(10, 8.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    _draw_curve(figure.add_subplot(grid[0, :]), report)
    _draw_parts(figure.add_subplot(grid[1, 0]), report)
    _draw_batches(figure.add_subplot(grid[1, 1]), report)
    names = " (solid) and ".join(each.url for each in report.all) + (" (dashed, hatched)" if report.against else "")
    items = f"{report.batch} item{'s' * (report.batch != 1)} a request"
    figure.suptitle(f"{report.model} at {names}, {items}", fontsize=12)
    figure.savefig(path, format="png", dpi=120)


def knee(levels: Sequence[LoadLevel]) -> LoadLevel | None:
    """Return the level of the highest throughput / mean latency: beyond, requests mostly wait. None below three levels.

    References
    ----------
    L. Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in computer communications", 1979
    """
    answered = [level for level in levels if level.client.requests]
    if len(answered) < 3:
        return None
    return max(answered, key=lambda level: level.client.throughput / level.client.latency.mean)


def _draw_curve(axes: Any, report: Report) -> None:
    """Draw latency over throughput, with a point for each load in order."""
    highest = 0.0
    for each, style in zip(report.all, ("-", "--"), strict=False):
        levels = [level for level in _by_load(each) if level.client.requests]
        throughputs = [level.client.throughput for level in levels]
        for name, colour in _PERCENTILES.items():
            latencies = [getattr(level.client.latency, name) for level in levels]
            highest = max(highest, *latencies, 0.0)
            axes.plot(throughputs, latencies, style, marker="o", markersize=5, color=colour,
                      label=name if each is report else None)
        for level in levels:
            axes.annotate(f"{level.load.amount:g}", (level.client.throughput, level.client.latency.p99),
                          textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8, color="#555555")
        if best := knee(levels):
            axes.plot(best.client.throughput, best.client.latency.p50, "o", markersize=13, fillstyle="none",
                      clip_on=False, color="black", label="knee: most throughput / latency" if each is report else None)
    if report.goal_ms is not None:
        highest = max(highest, report.goal_ms)
        axes.axhline(report.goal_ms, color="#E45756", linestyle=":", label=f"goal of p99: {report.goal_ms:g} ms")
    axes.set_ylim(0, 1.15 * highest or 1)
    axes.set_xlim(left=0)
    axes.margins(x=0.05)
    axes.set(xlabel="throughput [infer/s]", ylabel="latency [ms]",
             title=f"Latency over throughput, by {_load_name(report)}")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")


def _draw_parts(axes: Any, report: Report) -> None:
    """Draw the mean latency of each load as a stack of its parts."""
    width = 0.8 / len(report.all)
    for number, each in enumerate(report.all):
        levels = _by_load(each)
        positions = [at + (number - (len(report.all) - 1) / 2) * width for at in range(len(levels))]
        bottom = [0.0] * len(levels)
        for part, colour in _PARTS.items():
            heights = [level.parts_ms.get(part, 0.0) for level in levels]
            axes.bar(positions, heights, 0.9 * width, bottom, color=colour, hatch="//" * number, edgecolor="white",
                     linewidth=0.5, label=None if number else part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    _label_loads(axes, report)
    axes.set(ylabel="mean latency [ms]", title="Parts of latency")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="upper left")       # in the order of the stacked areas
    _note_missing(axes, any(level.parts_ms for each in report.all for level in each.levels))


def _draw_batches(axes: Any, report: Report) -> None:
    """Draw the batch sizes executed at each load: areas are shares of the executions, lines the means."""
    offset = 0.12 * (len(report.all) - 1)
    highest = 1
    for number, (each, style) in enumerate(zip(report.all, ("-", "--"), strict=False)):
        means: list[tuple[float, float]] = []
        for at, level in enumerate(_by_load(each)):
            if level.server is None:
                continue
            sizes = level.server.batch_sizes
            highest = max(highest, *sizes, 1)
            position = at + (2 * number - 1) * offset
            axes.scatter([position] * len(sizes), list(sizes), color=_BATCHES[number], alpha=0.5, linewidths=0,
                         s=[_MAX_AREA * count / max(1, sum(sizes.values())) for count in sizes.values()])
            means.append((position, level.server.mean_batch))
        axes.plot(*zip(*means, strict=True) if means else ((), ()), style, marker="_", markersize=14,
                  color=_BATCHES[number], label=f"mean{f', {each.url}' if report.against else ''}")
    _label_loads(axes, report)
    axes.set(ylabel="items in a batch", title="Executed batches (area: share of the executions)",
             ylim=(0, 1.15 * highest + 0.5))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper left")
    _note_missing(axes, any(level.server for each in report.all for level in each.levels))


def _label_loads(axes: Any, report: Report) -> None:
    loads = [level.load.amount for level in _by_load(report)]
    axes.set_xticks(range(len(loads)), [f"{load:g}" for load in loads])
    axes.set_xlim(-0.6, len(loads) - 0.4)
    axes.set_xlabel(_load_name(report))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _note_missing(axes: Any, is_known: bool) -> None:
    if not is_known:
        axes.text(0.5, 0.5, "no statistics from the server", transform=axes.transAxes, ha="center", color="#555555")


def _by_load(report: Report) -> list[LoadLevel]:
    return sorted(report.levels, key=lambda level: level.load.amount)


def _load_name(report: Report) -> str:
    return "requests in flight" if isinstance(report.levels[0].load, Closed) else "requests sent a second"
