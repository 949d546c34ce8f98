"""Prometheus metrics under Triton's names, in Prometheus's text format.

The text is written without a client library, because those append `_total` to the names of counters, which dashboards
for Triton would not find.
https://prometheus.io/docs/instrumenting/exposition_formats
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from infer_server.batching.statistics import ANSWERED_MS, CACHE_PHASES, PHASES, Counters, Duration, Executions
from infer_server.observing.custom_metrics import CustomMetrics
from infer_server.observing.gpus import COUNTERS, Gauge, Gpus
from infer_server.observing.machine import MachineMetrics, Samples
from infer_server.repository.model import Model
from infer_server.workers import run_off_loop

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTS: dict[str, tuple[str, Callable[[Counters], int]]] = {
    "nv_inference_request_success": ("Number of successful inference requests", lambda c: c.success.count),
}
_CACHE_COUNTERS: dict[str, tuple[str, Callable[[Counters], int]]] = {
    "nv_cache_num_hits_per_model": ("Number of cache hits per model", lambda c: c.cache_hit.count),
    "nv_cache_num_misses_per_model": ("Number of cache misses per model", lambda c: c.cache_miss.count),
}
_EXECUTIONS: dict[str, tuple[str, Callable[[Executions], int]]] = {
    "nv_inference_count": ("Number of inferences performed (a batch of n counts as n)", lambda e: e.items),
    "nv_inference_exec_count": ("Number of model executions performed", lambda e: e.batches),
}
_DURATIONS: dict[str, tuple[str, Callable[[Counters], Duration]]] = {
    "nv_inference_request_duration_us": ("inference request duration", lambda c: c.success),
    "nv_inference_queue_duration_us": ("inference queuing duration", lambda c: c.queue),
    "nv_inference_compute_input_duration_us": ("compute input duration", lambda c: c.compute_input),
    "nv_inference_compute_infer_duration_us": ("compute inference duration", lambda c: c.compute_infer),
    "nv_inference_compute_output_duration_us": ("inference compute output duration", lambda c: c.compute_output),
}
_CACHE_DURATIONS: dict[str, tuple[str, Callable[[Counters], Duration]]] = {
    "nv_cache_hit_duration_per_model": ("cache hit duration", lambda c: c.cache_hit),
    "nv_cache_miss_duration_per_model": ("cache miss duration", lambda c: c.cache_miss),
}
_PHASE_DURATIONS: dict[str, Callable[[Counters], Duration]] = {
    "request": lambda c: c.success, "queue": lambda c: c.queue, "compute_input": lambda c: c.compute_input,
    "compute_infer": lambda c: c.compute_infer, "compute_output": lambda c: c.compute_output,
    "cache_hit": lambda c: c.cache_hit, "cache_miss": lambda c: c.cache_miss}
_HISTOGRAM = "nv_inference_first_response_histogram_ms"


@dataclass(frozen=True)
class MetricsSettings:
    """Enabled metric families and the quantiles of summaries (--metrics-config)."""
    counter_latencies: bool = True
    summary_latencies: bool = True
    histogram_latencies: bool = True
    cpu: bool = True
    gpu: bool = True
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


class _Seen(NamedTuple):
    """Snapshot of a model's statistics for a scrape."""
    labels: str
    model: Model
    counters: Counters
    pending: int


class Metrics:
    """Renderer of the metrics page."""

    def __init__(self, settings: MetricsSettings = MetricsSettings(), gpus: Gpus | None = None,     # noqa: B008
                 custom: CustomMetrics | None = None, workers: Callable[[], Mapping[str, int]] = dict,
                 state: Callable[[], Iterable[tuple[str, str, Samples]]] = tuple) -> None:
        """Choose the sources of metrics.

        Parameters
        ----------
        settings : MetricsSettings
        gpus : Gpus, optional
            None: the GPUs of this machine.
        custom : CustomMetrics, optional
            Metrics that Python models create.
        workers : callable
            See MachineMetrics.
        state : callable
            Returns name, help text and values of the server's metrics; called on the event loop.
        """
        self._settings, self._custom, self._state = settings, custom or CustomMetrics(), state
        self._machine = MachineMetrics(workers)
        self._gpus = (gpus or Gpus()) if settings.gpu else None

    async def render(self, models: Iterable[Model]) -> str:
        """Return the metrics of models and the machine in Prometheus's text format.

        State that belongs to the event loop is read on it; the text is made on a thread.
        """
        of_gpus = await self._gpus.gauges() if self._gpus else ()
        pending = [(model, model.pending) for model in models]
        state = [*self._state()]
        return await run_off_loop(lambda: self._text(pending, state, of_gpus))

    def _text(self, pending: Iterable[tuple[Model, int]], state: Iterable[tuple[str, str, Samples]],
              of_gpus: Iterable[Gauge]) -> str:
        seen = [_Seen(_labels(model), model, model.statistics.snapshot(), waiting) for model, waiting in pending]
        lines = [*_counters(seen)]
        cached = [each for each in seen if each.model.config.cached]
        if self._settings.counter_latencies:
            lines += [*_durations(seen, _DURATIONS), *_durations(cached, _CACHE_DURATIONS)]
        if self._settings.summary_latencies:
            lines += _summaries(seen, self._settings.quantiles, "nv_inference_", PHASES)
            lines += _summaries(cached, self._settings.quantiles, "nv_", CACHE_PHASES)
        if self._settings.histogram_latencies:
            lines += _histogram(seen)
        for name, text, samples in state:
            lines += _family(name, _kind(name), text, samples.items())
        if self._settings.cpu:
            for name, text, samples in self._machine.gauges():
                lines += _family(name, _kind(name), text, samples.items())
        for name, text, values in of_gpus:
            lines += _family(name, "counter" if name in COUNTERS else "gauge", text,
                             ((f'gpu_uuid="{_escaped(uuid)}"', value) for uuid, value in values.items()))
        lines += _custom_metrics(self._custom)
        return "\n".join(lines) + "\n"


def _durations(seen: list[_Seen], families: Mapping[str, tuple[str, Callable[[Counters], Duration]]]) -> Iterator[str]:
    """Yield the families of durations; none if there are no models."""
    for name, (description, duration) in families.items() if seen else ():
        yield from _family(name, "counter", f"Cumulative {description} in microseconds",
                           ((each.labels, duration(each.counters).ns // 1000) for each in seen))


def _counters(seen: list[_Seen]) -> Iterator[str]:
    cached = [each for each in seen if each.model.config.cached]
    for families, models in ((_COUNTS, seen), (_CACHE_COUNTERS, cached)):
        for name, (text, count) in families.items() if models else ():
            yield from _family(name, "counter", text, [(each.labels, count(each.counters)) for each in models])
    for name, (text, of) in _EXECUTIONS.items():
        yield from _family(name, "counter", text, (
            (labels, of(done)) for each in seen for labels, done in _by_device(each)))
    yield from _family("nv_inference_request_failure", "counter", "Number of failed inference requests", (
        (_labels(each.model, reason=reason.value), failed)
        for each in seen for reason, failed in each.counters.failures.items()))
    yield from _family("nv_inference_pending_request_count", "gauge", "Instantaneous number of pending requests",
                       ((each.labels, each.pending) for each in seen))
    yield from _family("nv_model_load_duration_secs", "gauge", "Model load time in seconds",
                       ((each.labels, round(each.model.load_secs, 6)) for each in seen))
    yield from _family("infer_server_model_warmup_duration_secs", "gauge", "Model warm-up time in seconds, a part of "
                       "its load time", ((each.labels, round(each.model.warmup_secs, 6)) for each in seen))


def _by_device(seen: _Seen) -> Iterator[tuple[str, Executions]]:
    """Yield the labels and executions of a model for each device of its instances."""
    uuids = {gpu.number: gpu.uuid for gpu in seen.model.gpus}
    for device in dict.fromkeys(seen.model.config.devices):
        labels = _labels(seen.model, gpu_uuid=uuids[device]) if device in uuids else seen.labels
        yield labels, seen.counters.devices.get(device, Executions())


def _summaries(seen: list[_Seen], quantiles: tuple[float, ...], prefix: str, phases: Iterable[str]) -> Iterator[str]:
    """Yield a summary for each phase: quantiles of the last minute, and the sum and count since the start."""
    of_model = [(each, each.model.statistics.quantiles(quantiles)) for each in seen]
    for phase in phases if seen else ():
        name = f"{prefix}{phase}_summary_us"
        yield from _family(name, "summary", f"Summary of {phase.replace('_', ' ')} durations in microseconds", ())
        for each, quantiles_ns in of_model:
            for share, ns in zip(quantiles, quantiles_ns[phase], strict=True):
                yield f'{name}{{{each.labels},quantile="{share:g}"}} {_number(ns / 1000)}'
            total = _PHASE_DURATIONS[phase](each.counters)
            yield f"{name}_sum{{{each.labels}}} {total.ns // 1000}"
            yield f"{name}_count{{{each.labels}}} {total.count}"


def _histogram(seen: list[_Seen]) -> Iterator[str]:
    yield from _family(_HISTOGRAM, "histogram", "Duration from request to first response in milliseconds", ())
    for each in seen:
        bounds = [*map(str, ANSWERED_MS), "+Inf"]
        for bound, count in zip(bounds, accumulate(each.counters.answered), strict=True):
            yield f'{_HISTOGRAM}_bucket{{{each.labels},le="{bound}"}} {count}'
        first_ns = each.counters.success.ns - each.counters.responding_ns
        yield f"{_HISTOGRAM}_sum{{{each.labels}}} {_number(first_ns / 1e6)}"
        yield f"{_HISTOGRAM}_count{{{each.labels}}} {each.counters.success.count}"


def _custom_metrics(custom: CustomMetrics) -> Iterator[str]:
    for name, kind, text, samples in custom.families():
        yield from _family(name, kind, text.replace("\\", r"\\").replace("\n", r"\n"), ())
        for suffix, labels, value in samples:
            tags = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels)
            yield f"{name}{suffix}{f'{{{tags}}}' if tags else ''} {_number(value, is_rounded=False)}"


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{{{labels}}} {_number(value)}" if labels else f"{name} {_number(value)}"


def _kind(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"


def _number(value: float, is_rounded: bool = True) -> str:
    return "NaN" if value != value else str(round(value, 6) if is_rounded else value)


def _labels(model: Model, **more: str) -> str:
    """Return the labels of a model: name, version, the metric_tags of its configuration, and its GPU if it has one.

    They are sorted by name as in Triton, because users may match whole lines.
    """
    tags = {_name(name): value for name, value in sorted(model.config_message.metric_tags.items())}
    tags |= {"model": model.name, "version": str(model.version)}    # override tags, to keep models' lines distinct
    if len(set(model.config.devices)) == 1 == len(model.gpus):
        tags["gpu_uuid"] = model.gpus[0].uuid
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted({**tags, **more}.items()))


def _name(text: str) -> str:
    """Return text as a valid Prometheus label name that differs from the reserved `quantile` and `le`."""
    name = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in text)
    return f"_{name}" if name[:1].isdigit() or name in ("quantile", "le") else name or "_"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
