"""Latency percentiles and throughput over the load, as a PNG. Needs matplotlib (the extra "plot")."""
from __future__ import annotations

import importlib.util
from pathlib import Path

from clients.errors import ClientError
from clients.load.report import Report
from clients.load.schedule import Closed


def require_matplotlib() -> None:
    """Raises ClientError when matplotlib is not installed: to be asked before the test, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ClientError("--plot needs matplotlib: pip install 'infer-server[plot]', or use --csv and plot it "
                          "elsewhere")


def write_plot(report: Report, path: Path) -> None:
    """Writes the picture whatever the suffix of `path`; levels in the order of their load, a second server's dashed."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    closed = isinstance(report.levels[0].load, Closed)
    figure = Figure(figsize=(8, 7), layout="constrained")
    latency, throughput = figure.subplots(2, 1, sharex=True)
    highest = 0.0
    for each, line in zip(report.all, ("-", "--"), strict=False):
        levels = sorted(each.levels, key=lambda level: level.load.amount)
        loads = [level.load.amount for level in levels]
        answered = [level.client.throughput for level in levels]
        highest = max(highest, *answered)
        for colour, name in enumerate(("p50", "p90", "p95", "p99")):
            latency.plot(loads, [getattr(level.client.latency, name) for level in levels], line, marker="o",
                         color=f"C{colour}", label=f"{name} {each.url}" if report.against else name)
        throughput.plot(loads, answered, line, marker="o", color="black", label=each.url)
    latency.set_ylabel("latency [ms]")
    latency.set_ylim(bottom=0)
    latency.legend()
    if report.against:
        throughput.legend()
    throughput.set_ylabel("throughput [infer/s]")
    throughput.set_ylim(0, 1.1 * highest or 1)
    throughput.set_xlabel("requests in flight" if closed else "requests sent a second")
    if closed:
        throughput.set_xscale("log", base=2)
    throughput.set_xticks(loads, [f"{load:g}" for load in loads])
    for axes in (latency, throughput):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report.model}, batch {report.batch}")
    figure.savefig(path, format="png", dpi=120)
