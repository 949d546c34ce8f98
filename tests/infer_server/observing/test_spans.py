"""Tests of the OpenTelemetry spans of inferences, as children of the clients' spans."""
from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from infer_server.cli.tracing import parsed
from infer_server.observing.access_log import OK, AccessEntry
from infer_server.observing.spans import SpanSettings, SpanTracer
from scripts.testing.numpy_engine import write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.repository.test_ensembles import write_chain
from tests.infer_server.serving import RunningServer, serving

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter",
                             reason="opentelemetry-sdk is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OTLP over HTTP is not installed")
CLIENT = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
WITH_CONTEXT = {"traceparent": f"00-{'-'.join(CLIENT)}-01"}


@pytest.fixture(scope="module")
def exporter() -> Any:
    return memory.InMemorySpanExporter()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, exporter: Any) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "affine")
    write_model(folder, "fragile", kind="fails_on_negative")
    write_chain(folder, "affine", "affine", max_batch=8, dims="4")
    with serving(folder) as running:
        inferences = running.server._services.inferences
        inferences._tracer = SpanTracer(SpanSettings(), exporter)
        yield running


@pytest.fixture
def spans(server: RunningServer, exporter: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield a function that returns the spans recorded so far, by name."""
    exporter.clear()

    def made() -> dict[str, Any]:
        server.server._services.inferences._tracer._provider.force_flush()
        return {span.name: span for span in exporter.get_finished_spans()}
    yield made


def ask(library: Any, server: RunningServer, model: str, value: float, sampled: bool) -> None:
    port = server.ports.grpc if library is tritonclient.grpc else server.ports.http
    tensor = library.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.full((1, 4), value, np.float32))
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.infer(model, [tensor], request_id="7", headers={"traceparent": f"00-{'-'.join(CLIENT)}-0{int(sampled)}"})


@pytest.mark.parametrize("library", [tritonclient.grpc, tritonclient.http], ids=["gRPC", "HTTP"])
def test_a_request_has_spans_under_its_clients(library: Any, server: RunningServer, spans: Any) -> None:
    ask(library, server, "affine", 1, True)
    assert eventually(lambda: len(spans()) == 3)
    request, queue, compute = (spans()[name] for name in ("InferRequest", "queue", "compute"))
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == CLIENT
    assert queue.parent.span_id == compute.parent.span_id == request.context.span_id
    assert request.start_time <= queue.start_time <= queue.end_time == compute.start_time <= compute.end_time
    assert compute.end_time <= request.end_time and compute.attributes["infer.batch"] == 1
    assert request.attributes["triton.model_name"] == "affine" and request.attributes["triton.request_id"] == "7"
    assert request.attributes["triton.model_version"] == "1"            # the client named none
    assert request.resource.attributes["service.name"] == "infer-server" and request.status.is_unset
    assert request.resource.attributes["host.name"] == socket.gethostname()


def test_what_goes_wrong_is_an_error_and_what_its_client_does_not_trace_is_not_traced(
        server: RunningServer, spans: Any) -> None:
    ask(tritonclient.grpc, server, "affine", 1, False)
    with pytest.raises(InferenceServerException):
        ask(tritonclient.grpc, server, "fragile", -1, True)
    assert eventually(lambda: "InferRequest" in spans())
    assert spans()["InferRequest"].status.description == "ExecutionError"
    assert spans()["InferRequest"].attributes["triton.model_name"] == "fragile"


def test_no_request_is_traced_but_those_with_a_context_under_triton_s_command_line_for_that() -> None:
    settings = parsed(["rate=0", "level=TIMESTAMPS", "count=-1", "mode=opentelemetry"])
    assert isinstance(settings, SpanSettings) and settings.rate == 0
    (span,) = made_of(settings, {}, WITH_CONTEXT, {"traceparent": "00-0-0-01"})
    assert f"{span.parent.span_id:016x}" == CLIENT[1]


def test_so_many_requests_without_a_context_are_traced_and_all_with_one() -> None:
    spans = made_of(SpanSettings(rate=2, count=1), *[{}] * 8, WITH_CONTEXT)
    assert [span.parent is None for span in spans] == [True, False]


def test_steps_of_an_ensemble_have_spans_below_its_own(server: RunningServer, spans: Any) -> None:
    ask(tritonclient.grpc, server, "affine_affine_8", 1, True)
    assert eventually(lambda: "InferRequest" in spans())
    created = spans()
    assert created["affine"].parent.span_id == created["InferRequest"].context.span_id
    assert created["compute"].parent.span_id == created["affine"].context.span_id


def made_of(settings: SpanSettings, *requests: dict[str, str]) -> Any:
    """Return the spans of requests with these headers."""
    exporter = memory.InMemorySpanExporter()
    tracer = SpanTracer(settings, exporter)
    for headers in requests:
        if trace := tracer.begin("m", lambda name, headers=headers: headers.get(name, "")):     # type: ignore[misc]
            trace.end(AccessEntry("", "gRPC", "", "m", "", 0), OK)
    tracer.close()
    return exporter.get_finished_spans()


def test_spans_name_the_pod_and_what_the_environment_and_the_command_line_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("POD_NAME", "infer-server-7"), ("NODE_NAME", "node-1"), ("OTEL_SERVICE_NAME", "vision"),
                        ("OTEL_RESOURCE_ATTRIBUTES", "cloud.region=north,team=a")):
        monkeypatch.setenv(name, value)
    (span,) = (each for each in made_of(SpanSettings(resource={"team": "b"}), WITH_CONTEXT)
               if each.name == "InferRequest")
    attributes = dict(span.resource.attributes)
    expected = {"service.name": "vision", "host.name": "node-1", "k8s.pod.name": "infer-server-7",
                "k8s.node.name": "node-1", "k8s.namespace.name": None, "cloud.region": "north", "team": "b"}
    assert {name: attributes.get(name) for name in expected} == expected


def test_spans_go_to_a_collector_before_the_server_ends(tmp_path: Path) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Do not log."""

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = Thread(target=collector.serve_forever)
    thread.start()
    try:
        write_model(tmp_path, "affine")
        settings = parsed([f"opentelemetry,url=127.0.0.1:{collector.server_port}/v1/traces", "rate=1"])
        with serving(tmp_path, tracing=settings) as running:
            ask(tritonclient.http, running, "affine", 1, True)
        assert b"InferRequest" in received[0] and b"affine" in received[0]
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
