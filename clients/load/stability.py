"""When a measurement may stop: as in perf_analyzer, when three windows in a row agree."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WINDOWS = 3
TOLERANCE = 0.10        # of the three windows' mean
MIN_REQUESTS = 100      # in a window: fewer agree or disagree by chance, and have no 99th percentile


@dataclass(frozen=True)
class LoadWindow:
    """The summary of one window; latency is nan if nothing was answered within it."""
    requests: int
    throughput: float
    latency_ms: float


def is_stable(windows: Sequence[LoadWindow], throughput_is_given: bool = False) -> bool:
    """Whether throughput and mean latency of the last three windows are within 10 % of their means.

    In an open loop the schedule gives the throughput: its scatter says nothing about the server, and is left out.
    """
    last = windows[-WINDOWS:]
    if len(last) < WINDOWS or min(window.requests for window in last) < MIN_REQUESTS:
        return False
    return _agree([w.latency_ms for w in last]) and (throughput_is_given or _agree([w.throughput for w in last]))


def _agree(values: Sequence[float]) -> bool:
    mean = math.fsum(values) / len(values)
    return all(abs(value - mean) <= TOLERANCE * mean for value in values)
