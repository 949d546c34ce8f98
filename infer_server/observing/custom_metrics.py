"""Metrics that Python models make: families of counters, gauges and histograms, shown among the server's own.

Instances that name the same family and labels share a metric, as do models; it goes with the last model that made it.
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
_RESERVED = ("nv_", "process_", "infer_server_")           # the server's own
_OF_HISTOGRAM = ("_bucket", "_sum", "_count")
MOST = 4096                                 # metrics of a model: a page lists them all
KINDS = ("counter", "gauge", "histogram")
Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]          # what follows the family's name, labels, the value


class Owner:
    """A model, for as long as it is loaded."""

    def __init__(self) -> None:
        self.metrics = 0                    # how many are its own


@dataclass
class Metric:
    value: float = 0.0                      # of a histogram: the sum
    bounds: tuple[float, ...] = ()
    counts: list[int] = field(default_factory=list)         # of a histogram: those up to each bound, and all
    owners: WeakSet[Owner] = field(default_factory=WeakSet)


@dataclass
class Family:
    kind: str
    text: str
    metrics: dict[Labels, Metric] = field(default_factory=dict)

    def names(self, name: str) -> set[str]:
        """Under which its samples are shown, if that is the family's name, beside it."""
        return {name, *(name + suffix for suffix in _OF_HISTOGRAM if self.kind == "histogram")}


class CustomMetrics:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, Family] = {}

    def make(self, owner: Owner, name: str, kind: str, text: str, labels: Mapping[str, str],
             bounds: Sequence[float] = ()) -> None:
        """Makes a metric that is not there yet. Raises ValueError: the names are none, the family is another, or the
        model has too many. The arguments come from a model, and may be of other types."""
        _check_names(name, kind, text, labels)
        _check_bounds(name, kind, bounds)
        bounds = tuple(map(float, bounds))
        key = tuple(sorted(labels.items()))
        with self._lock:
            family = self._families.get(name) or self._made(name, kind, text)
            if family.kind != kind:
                raise ValueError(f"metric '{name}' is a {family.kind} already, and no {kind}")
            metric = family.metrics.get(key) or Metric(bounds=bounds, counts=[0] * (len(bounds) + bool(bounds)))
            if metric.bounds != bounds:
                raise ValueError(f"metric '{name}' has the buckets {list(metric.bounds)} already")
            if owner not in metric.owners:
                if owner.metrics == MOST:
                    raise ValueError(f"metric '{name}': its model has {MOST} metrics already; give them fewer labels")
                owner.metrics += 1
                metric.owners.add(owner)
            self._families[name], family.metrics[key] = family, metric

    def change(self, name: str, labels: Mapping[str, str], what: str, value: float) -> None:
        """Increments or sets a metric, or observes a value; nothing happens where its model has been unloaded."""
        with self._lock:
            if (metric := self._metric(name, labels)) is None:
                return
            metric.value = value if what == "set" else metric.value + value
            if what == "observe":
                metric.counts[bisect_left(metric.bounds, value)] += 1

    def value(self, name: str, labels: Mapping[str, str]) -> float:
        """0 where its model has been unloaded."""
        with self._lock:
            metric = self._metric(name, labels)
            return metric.value if metric else 0.0

    def release(self, owner: Owner) -> None:
        """The model is unloaded."""
        with self._lock:
            for family in self._families.values():
                for metric in family.metrics.values():
                    metric.owners.discard(owner)
            self._forget()

    def families(self) -> list[tuple[str, str, str, list[Sample]]]:
        """Of each: its name, kind, text and samples."""
        with self._lock:
            self._forget()
            return [(name, family.kind, family.text, [sample for labels, metric in family.metrics.items()
                                                      for sample in _samples(labels, metric)])
                    for name, family in self._families.items()]

    def _made(self, name: str, kind: str, text: str) -> Family:
        """A family that is not there yet. Raises ValueError: its samples would have the names of another's."""
        family = Family(kind, text)
        for other, each in self._families.items():
            if twice := family.names(name) & each.names(other):
                raise ValueError(f"metric '{name}': the {each.kind} '{other}' has samples that are named "
                                 f"'{min(twice)}', too")
        return family

    def _metric(self, name: str, labels: Mapping[str, str]) -> Metric | None:
        family = self._families.get(name)
        return family.metrics.get(tuple(sorted(labels.items()))) if family else None

    def _forget(self) -> None:
        """What no model has any more."""
        for name, family in list(self._families.items()):
            family.metrics = {labels: metric for labels, metric in family.metrics.items() if metric.owners}
            if not family.metrics:
                del self._families[name]


def _check_names(name: str, kind: str, text: str, labels: Mapping[str, str]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith(_RESERVED) or kind not in KINDS:
        raise ValueError(f"'{name}' ({kind}) is no name of a metric: letters, digits and _, not as "
                         f"{' or '.join(_RESERVED)} begin")
    if wrong := [label for label in labels if not _NAME.fullmatch(label) or ":" in label or label == "le"
                 or label.startswith("__")]:
        raise ValueError(f"metric '{name}': '{wrong[0]}' is no name of a label")
    for shown in (text, *labels.values()):
        if not isinstance(shown, str):
            raise ValueError(f"metric '{name}': expected text, got {shown!r}")
        shown.encode()                      # a half of a surrogate pair is no text; its UnicodeError is a ValueError


def _check_bounds(name: str, kind: str, bounds: Sequence[float]) -> None:
    if wrong := [bound for bound in bounds if type(bound) not in (int, float) or not isfinite(bound)]:
        raise ValueError(f"metric '{name}': {wrong[0]!r} is no bound of a bucket: expected a number")
    if (kind == "histogram") != bool(bounds) or sorted(set(bounds)) != [*bounds]:
        raise ValueError(f"metric '{name}': a histogram has buckets, the bounds of which ascend; others have none")


def _samples(labels: Labels, metric: Metric) -> Iterator[Sample]:
    if not metric.bounds:
        yield "", labels, metric.value
        return
    for bound, count in zip((*metric.bounds, "+Inf"), accumulate(metric.counts), strict=True):
        yield "_bucket", (*labels, ("le", str(bound).removesuffix(".0"))), count
    yield "_sum", labels, metric.value
    yield "_count", labels, sum(metric.counts)
