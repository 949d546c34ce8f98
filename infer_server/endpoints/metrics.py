"""Prometheus metrics under Triton's names, in the text format that Prometheus scrapes.

Written out by hand: client libraries rename counters to end in `_total`, and dashboards made for Triton would not find
them.
https://prometheus.io/docs/instrumenting/exposition_formats
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from infer_server.batching.statistics import Counters, Duration
from infer_server.repository.model import Model

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTS: dict[str, tuple[str, Callable[[Counters], int]]] = {
    "nv_inference_request_success": ("Number of successful inference requests", lambda c: c.success.count),
    "nv_inference_count": ("Number of inferences performed (a batch of n counts as n)", lambda c: c.inference_count),
    "nv_inference_exec_count": ("Number of model executions performed", lambda c: c.execution_count),
}
_DURATIONS: dict[str, tuple[str, Callable[[Counters], Duration]]] = {
    "nv_inference_request_duration_us": ("request", lambda c: c.success),
    "nv_inference_queue_duration_us": ("queuing", lambda c: c.queue),
    "nv_inference_compute_input_duration_us": ("compute input", lambda c: c.compute_input),
    "nv_inference_compute_infer_duration_us": ("compute inference", lambda c: c.compute_infer),
    "nv_inference_compute_output_duration_us": ("compute output", lambda c: c.compute_output),
}


def render(models: Iterable[Model]) -> str:
    """The metrics of all models that are ready, in Prometheus's text format."""
    models = list(models)
    counters = [(_labels(model), model.statistics.snapshot(), model.pending) for model in models]
    lines: list[str] = []
    for name, (text, count) in _COUNTS.items():
        lines += _family(name, "counter", text, ((labels, count(c)) for labels, c, _ in counters))
    lines += _family("nv_inference_request_failure", "counter", "Number of failed inference requests", (
        (f'{labels},reason="{reason.value}"', failed)
        for labels, c, _ in counters for reason, failed in c.failures.items()))
    for name, (what, duration) in _DURATIONS.items():
        lines += _family(name, "counter", f"Cumulative {what} duration in microseconds",
                         ((labels, duration(c).ns // 1000) for labels, c, _ in counters))
    lines += _family("nv_inference_pending_request_count", "gauge", "Instantaneous number of pending requests",
                     ((labels, pending) for labels, _, pending in counters))
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, int]]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{{{labels}}} {value}"


def _labels(model: Model) -> str:
    escaped = model.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'model="{escaped}",version="{model.version}"'
