"""An answer of plan-capacity as a table, as JSON and as a picture."""
from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer_server.cli.common import table
from infer_server.engines.errors import ConfigError
from infer_server.fleet.planning import SIMULATED, Answer, Point
from infer_server.fleet.simulate import CONNECTIONS

COLOURS = {"p50": "#4C78A8", "p99": "#E45756"}


def cores_of(answer: Answer, threads: int) -> tuple[int, float]:
    """Return the cores of all instances, and the additional cores that the event loops use."""
    fleet = answer.fleet
    return fleet.servers * fleet.instances * threads, answer.goal.rate * fleet.request_seconds


def assumptions(answer: Answer) -> list[str]:
    """Return the assumptions of the answer, a sentence each."""
    fleet, times = answer.fleet, answer.fleet.times
    lines = [f"times of batches: {times.source}; " + ", ".join(
                 f"{size}: {1e3 * seconds:.3g} ms" for size, seconds in zip(times.sizes, times.seconds, strict=True)),
             f"batches have up to {times.paying_batch(fleet.batch)} of {fleet.batch} items: a larger one saves less "
             "than 5 % an item; no queue delay, no preferred sizes, no deadlines",
             "requests have one item each and arrive independently of each other (a Poisson process)",
             f"a request takes {1e3 * fleet.request_seconds:g} ms of its server's one event loop (infer-server "
             f"--workers has more) and {1e3 * fleet.hop_seconds:g} ms on its way"]
    balancer = f"{fleet.balancers} balancer{'s' * (fleet.balancers != 1)} by {fleet.balancer}"
    if fleet.balancer == "connection":
        balancer = f"clients stay on one of {CONNECTIONS} connections a server"
    lines.append(balancer + ", which know only their own requests" * (fleet.balancers > 1))
    lines.append(f"{fleet.slow:.0%} of the servers take {fleet.slower:g} times as long" if fleet.slow
                 else "servers are equally fast, and all are up")
    if fleet.servers > SIMULATED:
        lines.append(f"{SIMULATED} of the {fleet.servers} servers are simulated, with their share of the requests and "
                     "balancers")
    return lines


def as_text(answer: Answer, threads: int) -> str:
    """Return the answer, a table and the assumptions."""
    fleet, goal, point = answer.fleet, answer.goal, answer.point
    cores, loops = cores_of(answer, threads)
    lines = [f"{fleet.servers} server{'s' * (fleet.servers != 1)} of {fleet.instances} "
             f"instance{'s' * (fleet.instances != 1)} ({cores} cores, and {loops:.1f} for their event loops) "
             f"{'hold' if answer.holds else 'do not hold'} {goal.rate:g} requests/s: p99 {1e3 * point.p99:.1f} ms, "
             f"goal {1e3 * goal.p99:g} ms", ""]
    rows = [("as planned", point), *([("one server less", answer.fewer)] if answer.fewer else []),
            *((f"load {point.load:.2f}", point) for point in answer.curve)]
    lines.append(table([[name, *_cells(point)] for name, point in rows],
                       ["", "servers", "requests/s", "load", "p50 ms", "p99 ms", "p99.9 ms", "in time"]))
    return "\n".join([*lines, "", "assumed:", *(f"* {line}" for line in assumptions(answer))])


def _cells(point: Point) -> Sequence[Any]:
    return (point.servers, f"{point.rate:.1f}", f"{point.load:.2f}", *(
        f"{1e3 * value:.1f}" for value in (point.p50, point.p99, point.p999)), f"{point.in_time:.2%}")


def as_json(answer: Answer, threads: int) -> dict[str, Any]:
    """Return the JSON object that --json prints."""
    cores, loops = cores_of(answer, threads)
    return {"servers": answer.fleet.servers, "instances": answer.fleet.instances, "cores": cores,
            "event_loop_cores": loops, "holds": answer.holds, "goal": {"rate": answer.goal.rate,
                                                                       "p99_ms": 1e3 * answer.goal.p99},
            "planned": answer.point.as_json(), "one_less": answer.fewer.as_json() if answer.fewer else None,
            "curve": [point.as_json() for point in answer.curve], "assumed": assumptions(answer)}


def require_matplotlib() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'infer-server[plot]', or use --json and plot it "
                          "elsewhere")


def write_plot(answer: Answer, path: Path) -> None:
    """Write a PNG of latency over load, with the goal and the planned rate."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    points = sorted([*answer.curve, answer.point], key=lambda point: point.rate)
    goal_ms, capacity = 1e3 * answer.goal.p99, answer.fleet.capacity
    highest = max(1.3 * goal_ms, min(3 * goal_ms, 1.2e3 * max(point.p99 for point in points)))
    for name, colour in COLOURS.items():
        axes.plot([point.rate for point in points], [1e3 * getattr(point, name) for point in points], marker="o",
                  markersize=4, color=colour, label=name)
    axes.axhline(goal_ms, color=COLOURS["p99"], linestyle=":", label=f"goal: {goal_ms:g} ms")
    axes.axvline(answer.goal.rate, color="#555555", linestyle="--", label=f"planned: {answer.goal.rate:g} requests/s")
    axes.set(xlabel="requests/s", ylabel="latency [ms]", xlim=(0, None), ylim=(0, highest),
             title=f"{answer.fleet.servers} servers of {answer.fleet.instances} instances, {answer.fleet.balancer}")
    loads: Any = (lambda rate: rate / capacity, lambda load: load * capacity)
    axes.secondary_xaxis("top", functions=loads).set_xlabel("load")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, format="png", dpi=120)
