"""Client-side measurements: the times of every request, and their summary over an interval.

Latency counts from the moment at which a request was due, not from that at which it was sent: otherwise a stall would
delay the requests that should have met it, and hide itself ("coordinated omission"). In a closed loop the two are one.
"""
from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OK = ""
MILLISECONDS = 1e3
WINDOWS = 3
TOLERANCE = 0.10        # relative to the mean of the three windows
MIN_REQUESTS = 100      # in a window: fewer agree or disagree by chance, and have no 99th percentile


class Recorder:
    """Recorded requests of one load, in the order in which they ended; times are monotonic seconds."""

    def __init__(self) -> None:
        self._due = array("d")
        self._sent = array("d")
        self._ended = array("d")
        self._statuses: list[str] = []

    def __len__(self) -> int:
        return len(self._statuses)

    def add(self, due: float, sent: float, ended: float, status: str) -> None:
        """Record a request; `status` is OK or the name of a gRPC status."""
        self._due.append(due)
        self._sent.append(sent)
        self._ended.append(ended)
        self._statuses.append(status)

    def since(self, first: int) -> Samples:
        """Return the requests from index `first` on."""
        due, sent, ended = (np.array(times[first:]) for times in (self._due, self._sent, self._ended))
        return Samples(due, sent, ended, np.array(self._statuses[first:], object))


@dataclass(frozen=True)
class Samples:
    """Requests as columns of equal length."""
    due: NDArray[np.float64]
    sent: NDArray[np.float64]
    ended: NDArray[np.float64]
    status: NDArray[np.object_]

    def where(self, chosen: NDArray[np.bool_]) -> Samples:
        return Samples(self.due[chosen], self.sent[chosen], self.ended[chosen], self.status[chosen])

    @property
    def succeeded(self) -> Samples:
        return self.where(self.status == OK)

    @property
    def latency_ms(self) -> NDArray[np.float64]:
        return (self.ended - self.due) * MILLISECONDS


@dataclass(frozen=True)
class Latency:
    """Latencies of an interval in milliseconds; nan if nothing was answered in it."""
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Summary:
    """Summary of an interval. throughput: items (requests * batch) answered in it per second."""
    seconds: float
    requests: int                   # due in the interval and answered
    throughput: float
    latency: Latency
    errors: Mapping[str, int]       # gRPC status -> requests due in the interval that ended so
    send_delay_ms: float            # 99th percentile of sent - due: how far the client itself fell behind
    mean_send_delay_ms: float


def percentile(values: NDArray[np.float64], percent: float) -> float:
    """Return the smallest value that at least `percent` % of the values do not exceed, without interpolation."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else float("nan")


def latency_of(milliseconds: NDArray[np.float64]) -> Latency:
    if not len(milliseconds):
        return Latency(*[float("nan")] * 6)
    p50, p90, p95, p99 = (percentile(milliseconds, percent) for percent in (50, 90, 95, 99))
    return Latency(float(milliseconds.mean()), p50, p90, p95, p99, float(milliseconds.max()))


def summarise(samples: Samples, begin: float, end: float, batch: int) -> Summary:
    """Summarise the latency of requests due in [begin, end), and the throughput of those that ended in it."""
    due = samples.where((samples.due >= begin) & (samples.due < end))
    ended = samples.where((samples.ended >= begin) & (samples.ended < end)).succeeded
    errors = Counter(status for status in due.status.tolist() if status != OK)
    answered = due.succeeded
    delays = (due.sent - due.due) * MILLISECONDS
    return Summary(seconds=end - begin, requests=len(answered.due),
                   throughput=len(ended.due) * batch / (end - begin), latency=latency_of(answered.latency_ms),
                   errors=dict(errors), send_delay_ms=percentile(delays, 99),
                   mean_send_delay_ms=float(delays.mean()) if len(delays) else float("nan"))


# ---- when a measurement may stop: as in perf_analyzer, when three windows in a row agree
@dataclass(frozen=True)
class LoadWindow:
    """Summary of one window; latency is nan if nothing was answered within it."""
    requests: int
    throughput: float
    latency_ms: float


def is_stable(windows: Sequence[LoadWindow], throughput_is_scheduled: bool = False) -> bool:
    """Return True if throughput and mean latency of the last three windows are within 10 % of their means.

    In an open loop the schedule determines the throughput, so that only latency is compared.
    """
    last = windows[-WINDOWS:]
    if len(last) < WINDOWS or min(window.requests for window in last) < MIN_REQUESTS:
        return False
    return _agree([w.latency_ms for w in last]) and (throughput_is_scheduled or _agree([w.throughput for w in last]))


def _agree(values: Sequence[float]) -> bool:
    mean = math.fsum(values) / len(values)
    return all(abs(value - mean) <= TOLERANCE * mean for value in values)
