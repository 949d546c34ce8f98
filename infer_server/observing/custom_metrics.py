"""Custom metrics of Python models: counters, gauges and histograms that are reported with the server's own.

Models and instances that use equal family names and labels share a metric; it is removed with the last of these models.
"""
from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite
from weakref import WeakSet

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_RESERVED = ("nv_", "process_", "infer_server_")           # prefixes of the server's metrics
_HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")
MAX_METRICS = 4096                          # limit of the metrics of a model, since each scrape lists them all
KINDS = ("counter", "gauge", "histogram")
Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]          # suffix of the family's name, labels, value


class MetricsOwner:
    """Identity of a loaded model."""

    def __init__(self) -> None:
        self.metrics = 0                    # number of metrics that it uses


@dataclass
class CustomMetric:
    """Metric of a family with particular labels."""
    value: float = 0.0                      # for a histogram: the sum of the observations
    bounds: tuple[float, ...] = ()
    counts: list[int] = field(default_factory=list)         # for a histogram: observations in each bucket
    owners: WeakSet[MetricsOwner] = field(default_factory=WeakSet)


@dataclass
class CustomFamily:
    """Metric family."""
    kind: str
    text: str
    metrics: dict[Labels, CustomMetric] = field(default_factory=dict)

    def names(self, name: str) -> set[str]:
        """Return the sample names that the family uses if it is called `name`."""
        return {name, *(name + suffix for suffix in _HISTOGRAM_SUFFIXES if self.kind == "histogram")}


class CustomMetrics:
    """Custom metrics of all models. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, CustomFamily] = {}

    def make(self, owner: MetricsOwner, name: str, kind: str, text: str, labels: Mapping[str, str],
             bounds: Sequence[float] = ()) -> None:
        """Create a metric if it does not exist, and register `owner` as a user of it.

        The arguments come from a model and may be of any type.

        Raises
        ------
        ValueError
            A name or bound is not valid, the family exists with another kind, or the model has too many metrics.
        """
        _check_names(name, kind, text, labels)
        _check_bounds(name, kind, bounds)
        bounds = tuple(map(float, bounds))
        key = tuple(sorted(labels.items()))
        with self._lock:
            family = self._families.get(name) or self._new_family(name, kind, text)
            if family.kind != kind:
                raise ValueError(f"metric '{name}' already exists as a {family.kind}, not a {kind}; use another name")
            metric = family.metrics.get(key) or CustomMetric(bounds=bounds, counts=[0] * (len(bounds) + bool(bounds)))
            if metric.bounds != bounds:
                raise ValueError(f"metric '{name}' already has the buckets {list(metric.bounds)}; use the same ones")
            if owner not in metric.owners:
                if owner.metrics == MAX_METRICS:
                    raise ValueError(f"metric '{name}': its model already has {MAX_METRICS} metrics; use fewer labels")
                owner.metrics += 1
                metric.owners.add(owner)
            self._families[name], family.metrics[key] = family, metric

    def change(self, name: str, labels: Mapping[str, str], operation: str, value: float) -> None:
        """Increment or set a metric, or observe a value; do nothing if its models were unloaded."""
        with self._lock:
            if (metric := self._metric(name, labels)) is None:
                return
            metric.value = value if operation == "set" else metric.value + value
            if operation == "observe":
                metric.counts[bisect_left(metric.bounds, value)] += 1

    def value(self, name: str, labels: Mapping[str, str]) -> float:
        """Return the value of a metric; 0 if its models were unloaded."""
        with self._lock:
            metric = self._metric(name, labels)
            return metric.value if metric else 0.0

    def release(self, owner: MetricsOwner) -> None:
        """Remove an unloaded model as a user of its metrics."""
        with self._lock:
            for family in self._families.values():
                for metric in family.metrics.values():
                    metric.owners.discard(owner)
            self._forget()

    def families(self) -> list[tuple[str, str, str, list[Sample]]]:
        """Return name, kind, description and samples of each family."""
        with self._lock:
            self._forget()
            return [(name, family.kind, family.text, [sample for labels, metric in family.metrics.items()
                                                      for sample in _samples(labels, metric)])
                    for name, family in self._families.items()]

    def _new_family(self, name: str, kind: str, text: str) -> CustomFamily:
        """Return a new family. Raises ValueError if its sample names collide with those of another family."""
        family = CustomFamily(kind, text)
        for other, each in self._families.items():
            if twice := family.names(name) & each.names(other):
                raise ValueError(f"metric '{name}': the {each.kind} '{other}' also has samples named '{min(twice)}'; "
                                 "use another name")
        return family

    def _metric(self, name: str, labels: Mapping[str, str]) -> CustomMetric | None:
        family = self._families.get(name)
        return family.metrics.get(tuple(sorted(labels.items()))) if family else None

    def _forget(self) -> None:
        """Remove metrics and families without users."""
        for name, family in list(self._families.items()):
            family.metrics = {labels: metric for labels, metric in family.metrics.items() if metric.owners}
            if not family.metrics:
                del self._families[name]


def _check_names(name: str, kind: str, text: str, labels: Mapping[str, str]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith(_RESERVED) or kind not in KINDS:
        raise ValueError(f"'{name}' ({kind}) is not a valid metric name: use letters, digits and _, without the "
                         f"prefixes {', '.join(_RESERVED)}")
    if wrong := [label for label in labels if not _NAME.fullmatch(label) or ":" in label or label == "le"
                 or label.startswith("__")]:
        raise ValueError(f"metric '{name}': '{wrong[0]}' is not a valid label name; use letters, digits and _")
    for shown in (text, *labels.values()):
        if not isinstance(shown, str):
            raise ValueError(f"metric '{name}': expected text, got {shown!r}")
        shown.encode()                      # raises UnicodeError, a ValueError, for lone surrogates


def _check_bounds(name: str, kind: str, bounds: Sequence[float]) -> None:
    if wrong := [bound for bound in bounds if type(bound) not in (int, float) or not isfinite(bound)]:
        raise ValueError(f"metric '{name}': {wrong[0]!r} is not a bucket bound; expected a finite number")
    if (kind == "histogram") != bool(bounds) or sorted(set(bounds)) != [*bounds]:
        raise ValueError(f"metric '{name}': expected ascending bucket bounds for a histogram, and none for other kinds")


def _samples(labels: Labels, metric: CustomMetric) -> Iterator[Sample]:
    if not metric.bounds:
        yield "", labels, metric.value
        return
    for bound, count in zip((*metric.bounds, "+Inf"), accumulate(metric.counts), strict=True):
        yield "_bucket", (*labels, ("le", str(bound).removesuffix(".0"))), count
    yield "_sum", labels, metric.value
    yield "_count", labels, sum(metric.counts)
