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
    """Writes the picture whatever the suffix of `path`; levels in the order of their load."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    closed = isinstance(report.levels[0].load, Closed)
    levels = sorted(report.levels, key=lambda level: level.load.amount)
    loads = [level.load.amount for level in levels]
    figure = Figure(figsize=(8, 7), layout="constrained")
    latency, throughput = figure.subplots(2, 1, sharex=True)
    for name in ("p50", "p90", "p95", "p99"):
        latency.plot(loads, [getattr(level.client.latency, name) for level in levels], marker="o", label=name)
    latency.set_ylabel("latency [ms]")
    latency.set_ylim(bottom=0)
    latency.legend()
    throughput.plot(loads, [level.client.throughput for level in levels], marker="o", color="black")
    throughput.set_ylabel("throughput [infer/s]")
    throughput.set_ylim(0, 1.1 * max(level.client.throughput for level in levels) or 1)
    throughput.set_xlabel("requests in flight" if closed else "requests sent a second")
    if closed:
        throughput.set_xscale("log", base=2)
    throughput.set_xticks(loads, [f"{load:g}" for load in loads])
    for axes in (latency, throughput):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report.model}, batch {report.batch}")
    figure.savefig(path, format="png", dpi=120)
