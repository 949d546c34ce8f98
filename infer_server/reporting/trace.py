"""Chrome trace of one inference: the kernels of a plan, one after the other, for Perfetto and chrome://tracing.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""
from __future__ import annotations

import json
from typing import Any

from infer_server.reporting.data import ReportData


def trace(data: ReportData) -> str:
    """Return the trace as JSON; times are in microseconds. "" without times."""
    if not data.total_us:
        return ""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 1, "name": "process_name", "args": {"name": data.plan.name}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": f"kernels, {data.basis}"}}]
    begin = 0.0
    for row in data.rows:
        us = row.us or 0.0
        detail = {"ops": row.title, "precision": row.precision, "tactic": row.step.tactic, "macs": row.step.macs,
                  "bytes": row.step.bytes, "fuses": list(row.step.fuses[:8])}
        bound = {"bound_us": round(row.bound_us, 3), "bound_by": row.limit} if row.bound_us is not None else {}
        events.append({"ph": "X", "pid": 1, "tid": 1, "cat": row.precision, "name": row.step.name,
                       "ts": round(begin, 3), "dur": round(us, 3), "args": {**detail, **bound}})
        begin += us
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, separators=(",", ":"))
