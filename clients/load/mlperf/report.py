"""Reports of MLPerf scenarios, as a table and as JSON.

JSON: {"model", "scenario", "servers": [{"url", "metric", "value", "runs": [run, ...]}, ...]}, where a run is

    {"rate": samples/s | null, "samples": int, "samples_per_sec", "p50_ms", "p90_ms", "p99_ms", "holds": bool,
     "invalid": why by MLPerf's rules | "", "errors": {gRPC status: samples}}
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from infer_server.clients.load.mlperf.run import Run, ScenarioResult
from infer_server.clients.load.report import in_columns
from infer_server.clients.load.schedule import Scenario


def scenario_table(model: str, scenario: Scenario, servers: Sequence[ScenarioResult]) -> str:
    lines = []
    for server in servers:
        header = ["rate", "samples", "samples/s", "p50", "p90", "p99", "holds", "errors"]
        lines += [f"{scenario.name} of {model} at {server.url}; latency in ms",
                  *in_columns([header, *map(_row, server.runs)]),
                  f"{scenario.name}: {server.value:.4g} {server.metric}"]
        if invalid := server.decisive.invalid:
            lines.append(f"no valid run by MLPerf's rules: {invalid}")
    if len(servers) == 2 and servers[0].value:
        lines.append(f"B / A: {servers[1].value / servers[0].value:.3g}")
    return "\n".join(lines)


def _row(run: Run) -> list[str]:
    return [f"{run.rate:.4g}" if run.rate else "-", str(run.samples), f"{run.samples_per_sec:.1f}",
            *(f"{ms:.2f}" for ms in (run.p50_ms, run.p90_ms, run.p99_ms)), "yes" if run.holds else "no",
            ", ".join(f"{count} {status}" for status, count in run.errors.items()) or "0"]


def write_scenario(model: str, scenario: Scenario, servers: Sequence[ScenarioResult], path: Path) -> None:
    path.write_text(json.dumps({"model": model, "scenario": scenario.name, "servers": list(map(asdict, servers))},
                               indent=2) + "\n")
