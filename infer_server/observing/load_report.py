"""Load reports with responses, for balancers that weigh servers by them (Open Request Cost Aggregation).

A client asks with the header endpoint-load-metrics-format. Over HTTP the response then has the header
endpoint-load-metrics in the format text or json, as with Triton, or endpoint-load-metrics-bin for bin; a gRPC response
has the trailer endpoint-load-metrics-bin.

References
----------
https://github.com/grpc/proposal/blob/master/A51-custom-backend-metrics.md
https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto
"""
from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict

from infer_server.protos import orca

HEADER = "endpoint-load-metrics-format"
TRAILER = "endpoint-load-metrics-bin"
_RESPONSE_HEADER = "endpoint-load-metrics"
_SAMPLE_SECS = 1.0              # age at which a report is renewed


class LoadTotals(NamedTuple):
    """Cumulative counters of all models, and the requests that wait now."""
    requests: int               # number of answered requests
    failures: int
    queue_ns: int               # sum of the times that answered requests waited
    waiting: int


class LoadReports:
    """Reports of the load between two samples, at least a second apart. Belongs to the event loop."""

    def __init__(self, totals: Callable[[], LoadTotals], cpu_secs: Callable[[], float], cores: int) -> None:
        """Take the sources: counters of the models, CPU time of the server, and the cores that it may use."""
        self._totals, self._cpu_secs, self._cores = totals, cpu_secs, cores
        self._sampled_at = time.monotonic()
        self._sample, self._cpu = LoadTotals(0, 0, 0, 0), 0.0
        self._report: orca.OrcaLoadReport | None = None
        self._binary = b""

    def report(self) -> orca.OrcaLoadReport:
        """Return the report of the last sample, taking another if a second has passed."""
        now = time.monotonic()
        if self._report is None or now - self._sampled_at >= _SAMPLE_SECS:
            self._report = self._measure(now)
            self._binary = self._report.SerializeToString()
        return self._report

    def binary(self) -> bytes:
        """Return the serialised report, the value of the gRPC trailer."""
        self.report()
        return self._binary

    def headers(self, form: str) -> Mapping[str, str]:
        """Return the HTTP headers of a report in the form that a client asks for; none for an unknown one."""
        form = form.strip().lower()
        if form == "bin":
            return {TRAILER: base64.b64encode(self.binary()).decode()}
        if form not in ("text", "json"):
            return {}
        numbers = MessageToDict(self.report(), preserving_proto_field_name=True)
        if form == "json":
            return {_RESPONSE_HEADER: f"JSON {json.dumps(numbers)}"}
        return {_RESPONSE_HEADER: "TEXT " + ", ".join(f"{name}={value:g}" for name, value in _flat(numbers).items())}

    def _measure(self, now: float) -> orca.OrcaLoadReport:
        before, cpu, secs = self._sample, self._cpu, max(now - self._sampled_at, 1e-3)
        self._sample, self._cpu, self._sampled_at = self._totals(), self._cpu_secs(), now
        requests = max(0, self._sample.requests - before.requests)          # an unloaded model takes its counts along
        queue_ns = max(0, self._sample.queue_ns - before.queue_ns)
        return orca.OrcaLoadReport(
            cpu_utilization=max(0.0, self._cpu - cpu) / secs / self._cores,
            # At least the request whose response has the report: Envoy refuses reports of 0 requests.
            rps_fractional=max(1, requests) / secs,
            eps=max(0, self._sample.failures - before.failures) / secs, named_metrics={
                "queue_seconds_per_request": queue_ns / 1e9 / requests if requests else 0.0,
                "pending_requests": float(self._sample.waiting)})


def _flat(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a report with names such as named_metrics.pending_requests."""
    flat: dict[str, float] = {}
    for name, value in numbers.items():
        flat |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return flat
