"""Spans of inferences for OpenTelemetry: a request, under its client's span if it says which, with its wait in the
queue and its execution.

    InferRequest ─┬─ queue
                  └─ compute

https://www.w3.org/TR/trace-context
https://opentelemetry.io/docs/specs/otel/trace
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from infer_server.observing.access_log import OK, Entry

MODE = "opentelemetry"
_PARENT = ("traceparent", "tracestate")     # headers of a request
_RESOURCE = {"service.name": "infer-server"}


@dataclass(frozen=True)
class TraceSettings:
    """What --trace-config says."""
    url: str = "http://localhost:4318/v1/traces"        # of a collector, OTLP over HTTP
    rate: int = 1000        # one of so many requests whose client does not say; as Triton's. 0: none of these
    resource: Mapping[str, str] = field(default_factory=dict)   # attributes of this server


def is_installed() -> bool:
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        return False
    return True


class Executed(Protocol):
    """How long an execution took: batching.statistics.BatchExecution."""
    @property
    def items(self) -> int: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def copied_ns(self) -> int: ...
    @property
    def computed_ns(self) -> int: ...
    @property
    def encoded_ns(self) -> int: ...


class Tracer:
    """Makes spans, which a thread of OpenTelemetry's sends."""

    def __init__(self, settings: TraceSettings, exporter: Any = None) -> None:
        """exporter: instead of one to settings.url."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        sampler = ParentBasedTraceIdRatio(1 / settings.rate if settings.rate else 0.0)
        self._provider = TracerProvider(sampler=sampler, shutdown_on_exit=False,
                                        resource=Resource.create({**_RESOURCE, **settings.resource}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=settings.url)))
        self._tracer = self._provider.get_tracer("infer_server")
        self._propagator = TraceContextTextMapPropagator()
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def begin(self, header: Callable[[str], str]) -> Trace:
        """The trace of a request with these headers."""
        given = {name: value for name in _PARENT if (value := header(name))}
        return Trace(self, self._propagator.extract(given) if given else None)

    def close(self) -> None:
        """Sends what is left. Blocks, as long as the collector takes."""
        self._provider.shutdown()

    def record(self, trace: Trace, entry: Entry, status: str) -> None:
        """Makes the spans of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        attributes: dict[str, Any] = {
            "triton.model_name": entry.model, "triton.model_version": entry.version, "triton.request_id": entry.id,
            "rpc.system": entry.protocol, "client.address": entry.client, "infer.items": entry.batch}
        request = self._tracer.start_span("InferRequest", trace.parent, SpanKind.SERVER, attributes,
                                          start_time=self._epoch_ns + entry.received_ns)
        if request.is_recording():
            inner = set_span_in_context(request, trace.parent)
            for name, (began_ns, ended_ns), about in trace.phases:
                span = self._tracer.start_span(name, inner, attributes=about, start_time=self._epoch_ns + began_ns)
                span.end(self._epoch_ns + ended_ns)
            if status != OK:
                request.set_status(Status(StatusCode.ERROR, status))
        request.end(self._epoch_ns + time.monotonic_ns())


class Trace:
    """Of one request, until it ends."""

    def __init__(self, tracer: Tracer, parent: Any) -> None:
        self._tracer, self.parent = tracer, parent
        self.phases: list[tuple[str, tuple[int, int], dict[str, int]]] = []

    def executed(self, enqueued_ns: int, execution: Executed) -> None:
        """A batch with the request in it was executed."""
        self.phases += [
            ("queue", (enqueued_ns, execution.started_ns), {}),
            ("compute", (execution.started_ns, execution.encoded_ns), {
                "infer.batch": execution.items, "infer.input_us": (execution.copied_ns - execution.started_ns) // 1000,
                "infer.output_us": (execution.encoded_ns - execution.computed_ns) // 1000})]

    def end(self, entry: Entry, status: str) -> None:
        self._tracer.record(self, entry, status)


def parsed(texts: Sequence[str]) -> TraceSettings | None:
    """What --trace-config says, each as Triton has it; None: nothing is traced. Raises ValueError."""
    settings, on = TraceSettings(), bool(texts)
    for text in texts:
        of_mode, _, setting = text.rpartition(",")
        name, _, value = setting.partition("=")
        if of_mode not in ("", MODE):
            raise ValueError(f"{text}: traces go to OpenTelemetry; write mode={MODE}")
        if of_mode and name == "url":
            settings = replace(settings, url=value if "://" in value else f"http://{value}")
        elif of_mode and name == "resource":
            key, _, of = value.partition("=")
            settings = replace(settings, resource={**settings.resource, key: of})
        elif name == "rate" and value.isdecimal():
            settings = replace(settings, rate=int(value))
        elif setting == "count=-1":
            continue        # as many as there are, which are all that there can be here
        elif name == "level" and value in ("OFF", "TIMESTAMPS"):
            on = on and value != "OFF"
        elif not of_mode and setting != f"mode={MODE}":
            raise ValueError(f"{text}: expected mode={MODE}, level=TIMESTAMPS or OFF, rate=N, count=-1, {MODE},url=URL "
                             f"or {MODE},resource=KEY=VALUE")
        elif of_mode:
            raise ValueError(f"{text}: expected {MODE},url=URL or {MODE},resource=KEY=VALUE; the rest is said by "
                             "OpenTelemetry's own variables, OTEL_BSP_SCHEDULE_DELAY and its like")
    if on and not is_installed():
        raise ValueError("OpenTelemetry is not installed: install infer-server[otel]")
    return settings if on else None
