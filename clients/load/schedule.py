"""Schedules: when requests are sent, in a closed loop or an open one.

A closed loop keeps a number of requests in flight: it measures capacity, and a slow server slows it down. An open loop
sends at a rate that is independent of the server, as independent users do: it measures the latency that they see.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHUNK = 1024


@dataclass(frozen=True)
class Closed:
    """Closed loop of `concurrency` requests in flight; each is replaced when it is answered."""
    concurrency: int

    @property
    def amount(self) -> float:
        return self.concurrency

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True)
class Open:
    """Open loop: Poisson arrivals at `rate` requests per second."""
    rate: float

    @property
    def amount(self) -> float:
        return self.rate

    def __str__(self) -> str:
        return f"rate {self.rate:g}/s"

    def arrivals(self, seed: int) -> Iterator[float]:
        """Yield the seconds from the start at which requests are due, without end; equal for equal seeds."""
        random = np.random.default_rng(seed)
        now = 0.0
        while True:
            for gap in random.exponential(1 / self.rate, CHUNK).tolist():
                now += gap
                yield now


Load = Closed | Open
SCENARIOS = ("SingleStream", "MultiStream", "Server", "Offline")


@dataclass(frozen=True)
class Scenario:
    """MLPerf scenario, whose load generator decides when requests are sent (clients/load/mlperf)."""
    name: str
    latency_ms: float               # limit for the 99th percentile in the Server scenario
    queries: int                    # at least
    samples_per_query: int          # in the MultiStream scenario
    logs: Path | None               # folder for LoadGen's logs
