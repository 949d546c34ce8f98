"""Who may execute next, where executions need resources that instances of all models share.

Each instance has a gate. Those that have a batch and must wait stand in line, by turns: an execution moves the turn of
its instance back by its priority, so that of two that always wait the one of priority 2 executes half as often. Whoever
stands further back passes only with what those before it leave of the resources: nobody waits for ever. Who did not
wait begins at the turn that its resources have come to, each of them by itself: what others execute with other
resources is nothing to it.

C. A. Waldspurger, W. E. Weihl, Stride Scheduling: Deterministic Proportional-Share Resource Management, 1995
"""
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from infer_server.config.groups import RateLimit, Resource
from infer_server.errors import ModelConfigError


class Gate:
    """Of one instance. Made by RateLimiter.gates()."""

    def __init__(self, limiter: RateLimiter, limit: RateLimit, wake: Callable[[], None]) -> None:
        self._limiter, self.limit, self.wake = limiter, limit, wake
        self.turn = 0               # belongs to the limiter
        self.in_line = False        # likewise

    def enter(self) -> bool:
        """Whether its instance may execute now, until leave(); else it stands in line, and is woken."""
        return self._limiter.enter(self)

    def leave(self) -> None:
        """It has executed. Not to be called with a lock that a wake() takes, as all below."""
        self._limiter.leave(self)

    def step_aside(self) -> None:
        """It has nothing to execute now, and stands in line no longer, if it did."""
        self._limiter.step_aside(self)

    def close(self) -> None:
        """There is no such instance any more."""
        self._limiter.close(self)


class RateLimiter:
    """Thread-safe."""

    def __init__(self, given: Mapping[str, int]) -> None:
        """given: of resources, by name, how much there is; of others as much as the most demanding instance needs."""
        self._given = given
        self._lock = threading.Lock()
        self._gates: dict[Gate, None] = {}
        self._used = Counter[Resource]()
        self._turns = Counter[Resource]()       # how far those who executed with it have come

    def gates(self, limits: Sequence[RateLimit], wakes: Sequence[Callable[[], None]]) -> list[Gate]:
        """wakes: have an instance that waits call enter() again. Raises ModelConfigError: one could never execute."""
        for resource, count in (need for limit in limits for need in limit.needs.items()):
            if count > self._given.get(resource.name, count):
                raise ModelConfigError(
                    f"instance_group.rate_limiter: it needs {count} of '{resource.name}', and there are "
                    f"{self._given[resource.name]}: give --rate-limit-resource {resource.name}:{count}, or more")
        made = [Gate(self, limit, wake) for limit, wake in zip(limits, wakes, strict=True)]
        with self._lock:
            self._gates.update(dict.fromkeys(made))
        return made

    def enter(self, gate: Gate) -> bool:
        with self._lock:
            if not gate.in_line:
                self._begin(gate)
            left = {resource: self._total(resource) - self._used[resource] for resource in gate.limit.needs}
            for other in self._line():
                if other is gate:
                    break
                for resource in left.keys() & other.limit.needs.keys():
                    left[resource] -= other.limit.needs[resource]
            if any(left[resource] < count for resource, count in gate.limit.needs.items()):
                return False
            self._used.update(gate.limit.needs)
            self._turns.update({resource: max(0, gate.turn - self._turns[resource]) for resource in gate.limit.needs})
            gate.turn += gate.limit.priority
            gate.in_line = False
            return True

    def leave(self, gate: Gate) -> None:
        with self._lock:
            self._used.subtract(gate.limit.needs)
        self._wake()

    def step_aside(self, gate: Gate) -> None:
        with self._lock:
            if not gate.in_line:
                return
            gate.in_line = False
        self._wake()

    def close(self, gate: Gate) -> None:
        with self._lock:
            del self._gates[gate]
        self._wake()

    def _begin(self, gate: Gate) -> None:
        """Who needs several resources begins where the furthest of them is, and so does from then on whoever needs the
        others: else all their turns up to there would come before it."""
        now = max((self._turns[resource] for resource in gate.limit.needs), default=0)
        self._turns.update({resource: now - self._turns[resource] for resource in gate.limit.needs})
        gate.in_line, gate.turn = True, max(gate.turn, now)

    def _total(self, resource: Resource) -> int:
        return self._given.get(resource.name) or max(gate.limit.needs.get(resource, 0) for gate in self._gates)

    def _line(self) -> list[Gate]:
        return sorted((gate for gate in self._gates if gate.in_line), key=lambda gate: gate.turn)

    def _wake(self) -> None:
        with self._lock:
            line = self._line()
        for gate in line:
            gate.wake()
