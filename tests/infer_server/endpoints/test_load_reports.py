"""Tests of load reports with responses (ORCA), on real sockets, by all fronts."""
from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer_server.observing import load_report
from infer_server.observing.load_report import LoadReports, LoadTotals
from infer_server.protos import http2, orca
from infer_server.protos import inference as pb
from infer_server.protos.grpc_framing import binary_value
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.http2_client import INFER, Http2Client
from tests.infer_server.serving import FRONTS, RunningServer, serving

pytestmark = pytest.mark.skipif(not http2.is_installed, reason="ngh2 is not installed")
X = np.ones((1, 4), np.float32)
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}).encode()


@pytest.fixture(params=FRONTS, scope="module")
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "m")
    with serving(folder, grpc_front=request.param) as running:
        yield running


def trailers(server: RunningServer, *metadata: tuple[str, str]) -> dict[str, bytes]:
    """Make an inference over gRPC and return the headers and trailers of the response.

    The client speaks HTTP/2 itself: grpcio keeps this trailer to itself.
    """
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=X.shape)
    request.raw_input_contents.append(X.tobytes())
    with Http2Client(server.ports.grpc) as client:
        stream = client.call(INFER, request.SerializeToString(),
                             *((name.encode(), value.encode()) for name, value in metadata))
        fields, data = client.answer(stream)
    assert fields[b"grpc-status"] == b"0" and data
    return {name.decode(): binary_value(value) if name.endswith(b"-bin") else value for name, value in fields.items()}


def headers(server: RunningServer, **more: str) -> Any:
    """Make an inference over HTTP and return the headers of the response."""
    url = f"http://127.0.0.1:{server.ports.http}/v2/models/m/infer"
    request = urllib.request.Request(url, BODY, {name.replace("_", "-"): value for name, value in more.items()})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECS) as response:
        assert json.load(response)["outputs"]
        return response.headers


def check(report: orca.OrcaLoadReport) -> None:
    assert report.cpu_utilization > 0 and report.rps_fractional > 0 and report.eps == 0
    assert set(report.named_metrics) == {"queue_seconds_per_request", "pending_requests"}


def test_a_grpc_response_has_a_report_if_the_client_asks(server: RunningServer) -> None:
    assert load_report.TRAILER not in trailers(server)
    for form in ("bin", "text"):
        check(orca.OrcaLoadReport.FromString(trailers(server, (load_report.HEADER, form))[load_report.TRAILER]))
    assert load_report.TRAILER not in trailers(server)


def test_an_http_response_has_a_report_in_the_form_that_the_client_asks_for(server: RunningServer) -> None:
    plain = headers(server)
    assert not [name for name in plain if name.lower().startswith("endpoint-load")]
    text = headers(server, endpoint_load_metrics_format="text")["endpoint-load-metrics"]
    assert text.startswith("TEXT cpu_utilization=") and "named_metrics.pending_requests=0" in text
    kind, _, report = headers(server, endpoint_load_metrics_format="JSON")["endpoint-load-metrics"].partition(" ")
    assert kind == "JSON" and json.loads(report)["cpu_utilization"] > 0
    binary = headers(server, endpoint_load_metrics_format="bin")["endpoint-load-metrics-bin"]
    check(orca.OrcaLoadReport.FromString(base64.b64decode(binary)))
    assert not [name for name in headers(server, endpoint_load_metrics_format="xml")
                if name.lower().startswith("endpoint-load")]


def test_frontend_workers_hand_reports_on(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    for front in FRONTS:
        with serving(tmp_path, grpc_front=f"{front}, 2 workers") as server:
            check(orca.OrcaLoadReport.FromString(trailers(server, (load_report.HEADER, "bin"))[load_report.TRAILER]))
            assert load_report.TRAILER not in trailers(server)
            assert headers(server, endpoint_load_metrics_format="json")["endpoint-load-metrics"].startswith("JSON ")


def test_a_report_is_of_the_time_between_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    now, totals, cpu = 100.0, LoadTotals(0, 0, 0, 0), 5.0
    monkeypatch.setattr(load_report.time, "monotonic", lambda: now)
    reports = LoadReports(lambda: totals, lambda: cpu, 4)
    reports.report()
    now, totals, cpu = 102.0, LoadTotals(100, 4, 5_000_000_000, 7), 9.0
    report = reports.report()
    assert (report.cpu_utilization, report.rps_fractional, report.eps) == (0.5, 50.0, 2.0)
    assert report.named_metrics == {"queue_seconds_per_request": 0.05, "pending_requests": 7.0}
    now, totals = 102.9, LoadTotals(200, 4, 0, 0)
    assert reports.report() is report and reports.binary() == report.SerializeToString()
    now, totals = 104.0, LoadTotals(50, 0, 0, 0)            # a model has been unloaded
    assert reports.report().rps_fractional == 0.5 and reports.report().eps == 0
