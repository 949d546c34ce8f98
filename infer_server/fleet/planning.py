"""Search for the fewest servers that hold a rate and a 99th percentile of latency."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from infer_server.engines.errors import ConfigError
from infer_server.fleet.simulate import Fleet, poisson, simulate

SIMULATED = 64              # servers that are simulated of a larger fleet, with their share of rate and balancers
LOADS = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)     # of the curve
MAX_SERVERS = 1_000_000


@dataclass(frozen=True)
class Goal:
    """Requests a second, and the most seconds that 99 % of them may take."""
    rate: float
    p99: float


@dataclass(frozen=True)
class Point:
    """Simulated latencies of a fleet at a rate, in seconds.

    load     share of the servers' capacity
    in_time  share of the requests that hold the goal
    """
    servers: int
    rate: float
    load: float
    p50: float
    p99: float
    p999: float
    in_time: float

    def as_json(self) -> dict[str, Any]:
        return {"servers": self.servers, "rate": self.rate, "load": self.load, "p50_ms": 1e3 * self.p50,
                "p99_ms": 1e3 * self.p99, "p999_ms": 1e3 * self.p999, "in_time": self.in_time}


@dataclass(frozen=True)
class Answer:
    """The fewest servers, their latencies, those with one server less, and the curve over the load."""
    fleet: Fleet
    goal: Goal
    point: Point
    fewer: Point | None
    curve: tuple[Point, ...]

    @property
    def holds(self) -> bool:
        return self.point.p99 <= self.goal.p99


@dataclass(frozen=True)
class Simulation:
    """Number of requests of a simulation, and the seed of all that is random."""
    requests: int = 50_000
    seed: int = 0

    def at(self, fleet: Fleet, rate: float, goal: Goal) -> Point:
        """Simulate a fleet at a rate. Of a fleet above SIMULATED servers, that many with their share are simulated."""
        share = min(1.0, SIMULATED / fleet.servers)
        part = replace(fleet, servers=min(fleet.servers, SIMULATED), balancers=max(1, round(fleet.balancers * share)))
        latencies = simulate(part, poisson(rate * part.servers / fleet.servers, self.requests, self.seed), self.seed)
        p50, p99, p999 = (float(value) for value in np.percentile(latencies, (50, 99, 99.9)))
        return Point(fleet.servers, rate, rate / fleet.capacity, p50, p99, p999,
                     float((latencies <= goal.p99).mean()))

    def fewest(self, fleet: Fleet, goal: Goal) -> Answer:
        """Return the fewest servers that hold a goal; the number in `fleet` is not read.

        Raises ConfigError if no number does, because requests take too long by themselves.
        """
        one = replace(fleet, servers=1)
        alone = self.at(one, one.capacity / 100, goal)
        if alone.p99 > goal.p99:
            raise ConfigError(f"no number of servers holds a p99 of {1e3 * goal.p99:g} ms: an idle server's is "
                              f"{1e3 * alone.p99:.3g} ms already; use more threads an instance or a faster model")
        least = max(1, math.ceil(goal.rate / one.capacity))
        points = dict[int, Point]()

        def holds(servers: int) -> bool:
            if servers > MAX_SERVERS:
                raise ConfigError(f"more than {MAX_SERVERS} servers would be needed; check the rate and the times")
            if servers not in points:
                points[servers] = self.at(replace(fleet, servers=servers), goal.rate, goal)
            return points[servers].p99 <= goal.p99

        low, high = least - 1, least        # low does not hold
        while not holds(high):
            low, high = high, high + max(1, (high - least + 1), high // 16)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return self.answer(replace(fleet, servers=high), goal, points)

    def answer(self, fleet: Fleet, goal: Goal, known: Mapping[int, Point] | None = None) -> Answer:
        """Return the latencies of a fleet of a given size. known: points at the goal's rate by number of servers."""
        def at_rate(servers: int) -> Point:
            return (known or {}).get(servers) or self.at(replace(fleet, servers=servers), goal.rate, goal)

        fewer = at_rate(fleet.servers - 1) if fleet.servers > 1 else None
        curve = tuple(self.at(fleet, load * fleet.capacity, goal) for load in LOADS)
        return Answer(fleet, goal, at_rate(fleet.servers), fewer, curve)
