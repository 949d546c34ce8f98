"""OpenTelemetry spans of inferences: queue and compute spans of a request, or the steps of an ensemble.

The span of a request is a child of the client's span, if the request headers name one.

    InferRequest ─┬─ queue
                  ├─ compute
                  └─ a step's model ─┬─ queue
                                     └─ compute

https://www.w3.org/TR/trace-context
https://opentelemetry.io/docs/specs/otel/trace
"""
from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer_server.errors import NotServedError
from infer_server.observing.access_log import OK, AccessEntry
from infer_server.observing.trace_settings import Sampler, TraceSettings
from infer_server.observing.traces import TIMESTAMPS, RequestTrace

MODE = "opentelemetry"
_PARENT = ("traceparent", "tracestate")     # request headers with the client's span
# Resource attributes of a pod by the environment variables that deploy/kubernetes sets.
_POD_VARIABLES = {"k8s.pod.name": "POD_NAME", "k8s.namespace.name": "POD_NAMESPACE", "k8s.node.name": "NODE_NAME"}


@dataclass(frozen=True)
class SpanSettings:
    """Settings of OpenTelemetry tracing: exporter and sampling."""
    url: str = "http://localhost:4318/v1/traces"        # OTLP/HTTP address of the collector
    rate: int = 1000        # trace one of `rate` requests without a client's span, as in Triton; 0 for none
    count: int = -1         # number of such requests to trace; -1 for no limit
    resource: Mapping[str, str] = field(default_factory=dict)   # resource attributes of this server


def _resource(attributes: Mapping[str, str]) -> Any:
    """Return the resource of all spans: defaults, then OTEL_RESOURCE_ATTRIBUTES and its like, then the command line."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    of_pod = {name: value for name, variable in _POD_VARIABLES.items() if (value := os.environ.get(variable))}
    defaults = {"service.name": "infer-server", "host.name": of_pod.get("k8s.node.name") or socket.gethostname(),
                **of_pod}
    return Resource.create(defaults).merge(OTELResourceDetector().detect()).merge(Resource(dict(attributes)))


def is_installed() -> bool:
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        return False
    return True


class SpanTracer:
    """Tracer that exports OpenTelemetry spans, on a thread of the SDK."""

    def __init__(self, settings: SpanSettings, exporter: Any = None) -> None:
        """Create a tracer that exports to settings.url, or with `exporter` if it is given."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        self._settings = settings
        self._sampler = Sampler(TraceSettings(levels=(TIMESTAMPS,), rate=settings.rate, count=settings.count))
        self._provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False,
                                        resource=_resource(settings.resource))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=settings.url)))
        self._tracer = self._provider.get_tracer("infer_server")
        self._propagator = TraceContextTextMapPropagator()
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def begin(self, model: str, header: Callable[[str], str]) -> RequestTrace | None:
        from opentelemetry.trace import get_current_span
        headers = {name: value for name in _PARENT if (value := header(name))}
        parent = self._propagator.extract(headers) if headers else None
        client = get_current_span(parent).get_span_context()
        if parent and client.is_valid:
            return RequestTrace(self._record, parent=parent) if client.trace_flags.sampled else None
        return RequestTrace(self._record) if self._sampler.sample() else None

    def settings_of(self, model: str) -> Mapping[str, Sequence[str]]:
        return {"trace_level": [TIMESTAMPS], "trace_rate": [str(self._settings.rate)],
                "trace_count": [str(self._sampler.remaining)], "trace_mode": [MODE], "url": [self._settings.url]}

    def update(self, model: str, settings: Mapping[str, Sequence[str]]) -> None:
        raise NotServedError(f"trace settings can not be updated where they are of mode {MODE}: restart the server "
                             "with another --trace-config")

    def close(self) -> None:
        """Export the remaining spans. Blocks until the collector has received them."""
        self._provider.shutdown()

    def _record(self, trace: RequestTrace, entry: AccessEntry, status: str) -> None:
        """Create the spans of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        attributes: dict[str, Any] = {
            "triton.model_name": entry.model, "triton.request_id": entry.id,
            "triton.model_version": str(trace.version) if trace.version >= 0 else entry.version,
            "rpc.system": entry.protocol, "client.address": entry.client, "infer.items": entry.batch}
        request = self._tracer.start_span("InferRequest", trace.parent, SpanKind.SERVER, attributes,
                                          start_time=self._epoch_ns + entry.received_ns)
        self._phases(trace, request, trace.parent)
        if status != OK:
            request.set_status(Status(StatusCode.ERROR, status))
        request.end(self._epoch_ns + trace.ended_ns)

    def _phases(self, trace: RequestTrace, span: Any, parent: Any) -> None:
        """Create the child spans of a request or a step."""
        from opentelemetry.trace import set_span_in_context
        inner = set_span_in_context(span, parent)
        for enqueued_ns, execution in trace.executions:
            self._phase(inner, "queue", enqueued_ns, execution.started_ns)
            self._phase(inner, "compute", execution.started_ns, execution.encoded_ns, {
                "infer.batch": execution.items, "infer.input_us": (execution.copied_ns - execution.started_ns) // 1000,
                "infer.output_us": (execution.encoded_ns - execution.computed_ns) // 1000})
        for step in trace.steps:
            began = self._tracer.start_span(step.model, inner, attributes={
                "triton.model_name": step.model, "triton.model_version": str(step.version)},
                start_time=self._epoch_ns + step.began_ns)
            self._phases(step, began, inner)
            began.end(self._epoch_ns + (step.ended_ns or trace.ended_ns))

    def _phase(self, inner: Any, name: str, began_ns: int, ended_ns: int,
               about: Mapping[str, int] | None = None) -> None:
        span = self._tracer.start_span(name, inner, attributes=about, start_time=self._epoch_ns + began_ns)
        span.end(self._epoch_ns + ended_ns)
