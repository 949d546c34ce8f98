"""A finished load test as a table, as JSON and as CSV.

JSON: {"model", "version", "url", "batch", "duration_s", "warmup_s", "seed", "levels": [level, ...]}, where a level is

    {"mode": "closed" | "open", "concurrency": int | null, "rate": requests/s | null,
     "stopped_by": "stable" | "duration", "measured_s": s, "requests": int, "throughput": items/s,
     "latency_ms": {"mean", "p50", "p90", "p95", "p99", "max"},      null where nothing was answered
     "errors": {gRPC status: count}, "send_delay_p99_ms": ms,
     "server": {"queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms",     means of a request
                "executions": int, "mean_batch": float, "batch_sizes": {size: executions}} | null}

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

from clients.load.generator import LoadLevel
from clients.load.schedule import Closed

LATE_MS = 5.0           # beyond what an event loop's timer and a busy moment explain
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
    levels: Sequence[LoadLevel]


def as_json(report: Report) -> dict[str, Any]:
    """The document described above, as plain values."""
    head = {field.name: getattr(report, field.name) for field in fields(report) if field.name != "levels"}
    return {**head, "levels": [_level(level) for level in report.levels]}


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
            "errors": dict(client.errors), "send_delay_p99_ms": _number(client.send_delay_ms), "server": server}


def _number(value: float) -> float | None:
    """JSON has no nan."""
    return None if math.isnan(value) else value


def write_json(report: Report, path: Path) -> None:
    path.write_text(json.dumps(as_json(report), indent=2) + "\n")


CSV_COLUMNS = ("mode", "concurrency", "rate", "batch", "stopped_by", "measured_s", "requests", "throughput",
               *(f"latency_ms.{name}" for name in (*PERCENTILES, "max")), "errors", "send_delay_p99_ms",
               *(f"server.{name}" for name in ("queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms",
                                               "executions", "mean_batch", "batch_sizes")))


def write_csv(report: Report, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for level in as_json(report)["levels"]:
            row = {**level, "batch": report.batch, "errors": sum(level["errors"].values())}
            server = row.pop("server") or {}
            server["batch_sizes"] = " ".join(f"{size}:{count}" for size, count in server.get("batch_sizes", {}).items())
            row |= {f"latency_ms.{name}": value for name, value in row.pop("latency_ms").items()}
            row |= {f"server.{name}": value for name, value in server.items()}
            writer.writerow([row.get(column) for column in CSV_COLUMNS])


def table(report: Report) -> str:
    """What a person reads: a line a level, then what went wrong."""
    header = ["load", "infer/s", *PERCENTILES, "queue", "input", "infer", "output", "batch", "errors", "measured"]
    rows = [header, *(_row(level) for level in report.levels)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width
                                                   in zip(row[1:], widths[1:], strict=True))]) for row in rows]
    title = f"{report.model} at {report.url}, batch {report.batch}; latency and its parts in the server in ms"
    return "\n".join([title, *lines, *(note for level in report.levels for note in _notes(level))])


def _row(level: LoadLevel) -> list[str]:
    def ms(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.2f}"

    latency, server = level.client.latency, level.server
    inside = ["-"] * 5 if server is None else [
        *map(ms, (server.queue_ms, server.compute_input_ms, server.compute_infer_ms, server.compute_output_ms)),
        f"{server.mean_batch:.1f}"]
    return [str(level.load), f"{level.client.throughput:.1f}", *(ms(getattr(latency, name)) for name in PERCENTILES),
            *inside, str(sum(level.client.errors.values())),
            f"{'stable' if level.stopped_by == 'stable' else 'all'} {level.client.seconds:.1f} s"]


def _notes(level: LoadLevel) -> list[str]:
    notes = [f"{level.load}: {count} requests ended with {status}: {level.messages.get(status, '')}"
             for status, count in level.client.errors.items()]
    if level.client.send_delay_ms > LATE_MS:
        notes.append(f"{level.load}: the client fell behind: 1 % of the requests were sent "
                     f"{level.client.send_delay_ms:.1f} ms late or more, which their latency counts")
    if level.server and level.server.batch_sizes:
        sizes = ", ".join(f"{count} of {size}" for size, count in level.server.batch_sizes.items())
        notes.append(f"{level.load}: executed batches: {sizes}")
    return notes
