"""A finished load test as a table, as JSON and as CSV.

JSON: {"model", "version", "url", "batch", "duration_s", "warmup_s", "seed", "goal_ms": ms | null,
"levels": [level, ...]}, where a level is

    {"mode": "closed" | "open", "concurrency": int | null, "rate": requests/s | null,
     "stopped_by": "stable" | "duration", "measured_s": s, "requests": int, "throughput": items/s,
     "latency_ms": {"mean", "p50", "p90", "p95", "p99", "max"},      null where nothing was answered
     "errors": {gRPC status: count}, "send_delay_p99_ms": ms,
     "parts_ms": {"client", "network", "queue", "compute"},          of the mean latency; {} where not known
     "client_busy": share of the time that the load generator's thread computed, "client_cpu_us": us of it a request,
     "server": {"queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms",     means of a request
                "executions": int, "mean_batch": float, "batch_sizes": {size: executions}} | null}

Of two servers, "against" has such a document of the second.
CSV: a row a level, a column a leaf of the above ("latency_ms.p99"); batch_sizes as "1:20 4:37".
"""
from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from infer_server.clients.load.generator import LoadLevel
from infer_server.clients.load.schedule import Closed

LATE_MS = 5.0           # lateness that timers and short bursts of CPU use do not explain
BUSY = 0.9              # share of its time from which on the load generator's thread is the limit
PERCENTILES = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True)
class Report:
    """A finished load test: its settings, and the result of each load."""
    model: str
    version: str            # "" is the server's choice
    url: str
    batch: int
    duration_s: float
    warmup_s: float
    seed: int
    goal_ms: float | None   # limit for the 99th percentile of latency
    levels: Sequence[LoadLevel]
    against: Report | None = None       # report of another server under the same load

    @property
    def all(self) -> list[Report]:
        """Return this report, and that of the other server if there is one."""
        return [self, *([self.against] if self.against else [])]


def as_json(report: Report) -> dict[str, Any]:
    """Return the JSON document that the module describes, as plain values."""
    head = {field.name: getattr(report, field.name) for field in fields(report)
            if field.name not in ("levels", "against")}
    return {**head, "levels": [_level(level) for level in report.levels],
            **({"against": as_json(report.against)} if report.against else {})}


def _level(level: LoadLevel) -> dict[str, Any]:
    client, load = level.client, level.load
    server = asdict(level.server) if level.server else None
    if server:
        server["batch_sizes"] = {str(size): count for size, count in server["batch_sizes"].items()}
    sent = ({"mode": "closed", "concurrency": load.concurrency, "rate": None} if isinstance(load, Closed) else
            {"mode": "open", "concurrency": None, "rate": load.rate})
    return {**sent,
            "stopped_by": level.stopped_by, "measured_s": client.seconds, "requests": client.requests,
            "throughput": client.throughput,
            "latency_ms": {name: _number(value) for name, value in asdict(client.latency).items()},
            "errors": dict(client.errors), "send_delay_p99_ms": _number(client.send_delay_ms),
            "parts_ms": level.parts_ms, "client_busy": level.client_busy,
            "client_cpu_us": _number(level.client_cpu_us), "server": server}


def _number(value: float) -> float | None:
    """Return a number, or None for nan, which JSON lacks."""
    return None if math.isnan(value) else value


def write_json(report: Report, path: Path) -> None:
    path.write_text(json.dumps(as_json(report), indent=2) + "\n")


CSV_COLUMNS = ("mode", "concurrency", "rate", "batch", "stopped_by", "measured_s", "requests", "throughput",
               *(f"latency_ms.{name}" for name in (*PERCENTILES, "max")), "errors", "send_delay_p99_ms", "client_busy",
               "client_cpu_us", *(f"parts_ms.{name}" for name in ("client", "network", "queue", "compute")),
               *(f"server.{name}" for name in ("queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms",
                                               "executions", "mean_batch", "batch_sizes")), "url")


def write_csv(report: Report, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for each in report.all:
            for level in map(_level, each.levels):
                row = {**level, "batch": each.batch, "url": each.url, "errors": sum(level["errors"].values())}
                server = row.pop("server") or {}
                server["batch_sizes"] = " ".join(
                    f"{size}:{count}" for size, count in server.get("batch_sizes", {}).items())
                row |= {f"latency_ms.{name}": value for name, value in row.pop("latency_ms").items()}
                row |= {f"parts_ms.{name}": value for name, value in row.pop("parts_ms").items()}
                row |= {f"server.{name}": value for name, value in server.items()}
                writer.writerow([row.get(column) for column in CSV_COLUMNS])


def table(report: Report) -> str:
    """Return the report as text: a line for each level of a server, its errors, and a comparison of two servers."""
    header = ["load", "infer/s", *PERCENTILES, "queue", "input", "infer", "output", "batch", "errors", "measured"]
    texts = []
    for each in report.all:
        texts += [f"{each.model} at {each.url}, batch {each.batch}; latency and its parts in the server in ms",
                  *in_columns([header, *(_row(level) for level in each.levels)]),
                  *(note for level in each.levels for note in _notes(level)), *_goal(each)]
    if report.against:
        texts += ["", f"A: {report.url}, B: {report.against.url}; latency in ms", *in_columns([
            ["load", "infer/s A", "infer/s B", "B / A", *(f"{name} {of}" for name in ("p50", "p99") for of in "AB")],
            *map(_pair, report.levels, report.against.levels)])]
    return "\n".join(texts)


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the cells of lines in columns, the first column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width
                                                  in zip(row[1:], widths[1:], strict=True))]) for row in rows]


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _pair(a: LoadLevel, b: LoadLevel) -> list[str]:
    one, other = a.client, b.client
    ratio = f"{other.throughput / one.throughput:.2f}" if one.throughput else "-"
    return [str(a.load), f"{one.throughput:.1f}", f"{other.throughput:.1f}", ratio,
            *map(_ms, (one.latency.p50, other.latency.p50, one.latency.p99, other.latency.p99))]


def _row(level: LoadLevel) -> list[str]:
    latency, server = level.client.latency, level.server
    inside = ["-"] * 5 if server is None else [
        *map(_ms, (server.queue_ms, server.compute_input_ms, server.compute_infer_ms, server.compute_output_ms)),
        f"{server.mean_batch:.1f}"]
    return [str(level.load), f"{level.client.throughput:.1f}", *(_ms(getattr(latency, name)) for name in PERCENTILES),
            *inside, str(sum(level.client.errors.values())),
            f"{'stable' if level.stopped_by == 'stable' else 'all'} {level.client.seconds:.1f} s"]


def _goal(report: Report) -> list[str]:
    if report.goal_ms is None:
        return []
    fast = [level for level in report.levels if level.client.latency.p99 <= report.goal_ms and not level.client.errors]
    if not fast:
        return [f"no load has a p99 of at most {report.goal_ms:g} ms"]
    best = max(fast, key=lambda level: level.client.throughput)
    return [f"most with a p99 of at most {report.goal_ms:g} ms: {best.client.throughput:.1f} infer/s at {best.load}"]


def _notes(level: LoadLevel) -> list[str]:
    notes = [f"{level.load}: {count} requests ended with {status}: {level.messages.get(status, '')}"
             for status, count in level.client.errors.items()]
    if level.client.send_delay_ms > LATE_MS:
        notes.append(f"{level.load}: the client fell behind: 1 % of the requests were sent "
                     f"{level.client.send_delay_ms:.1f} ms late or more, which their latency counts")
    if level.client_busy > BUSY:
        notes.append(f"{level.load}: the load generator was the limit: its thread was busy for "
                     f"{level.client_busy:.0%} of the time; the server may be able to do more than this")
    if level.server and level.server.batch_sizes:
        sizes = ", ".join(f"{count} of {size}" for size, count in level.server.batch_sizes.items())
        notes.append(f"{level.load}: executed batches: {sizes}")
    return notes
