"""Rate limiter: order executions that need resources shared by the instances of all models.

Each instance has a gate. Gates that have a batch and must wait form a line, ordered by their turns: an execution delays
the turn of its instance by its priority, so that of two instances that always wait, one of priority 2 executes half as
often as one of priority 1. A gate further back passes only with resources that those before it leave, so that none
waits for ever. A gate that did not wait begins at the latest turn of its resources; executions with other resources do
not affect it.

C. A. Waldspurger, W. E. Weihl, Stride Scheduling: Deterministic Proportional-Share Resource Management, 1995
"""
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from infer_server.config.groups import RateLimit, Resource
from infer_server.errors import ModelConfigError


class RateGate:
    """Gate of one instance, created by RateLimiter.gates()."""

    def __init__(self, limiter: RateLimiter, limit: RateLimit, wake: Callable[[], None]) -> None:
        self._limiter, self.limit, self.wake = limiter, limit, wake
        self.turn = 0               # this and in_line are changed by the limiter
        self.in_line = False

    def enter(self) -> bool:
        """Return True if the instance may execute now, until leave(); otherwise it stands in line and is woken."""
        return self._limiter.enter(self)

    def leave(self) -> None:
        """Release the resources after an execution. Do not hold a lock that a wake() acquires, here and below."""
        self._limiter.leave(self)

    def step_aside(self) -> None:
        """Leave the line, because the instance has nothing to execute now."""
        self._limiter.step_aside(self)

    def close(self) -> None:
        """Remove the gate of an instance that has ended."""
        self._limiter.close(self)


class RateLimiter:
    """Rate limiter of all models. Thread-safe."""

    def __init__(self, amounts: Mapping[str, int]) -> None:
        """Limit resources to `amounts` by name; the default is what the most demanding instance needs."""
        self._amounts = amounts
        self._lock = threading.Lock()
        self._gates: dict[RateGate, None] = {}
        self._used = Counter[Resource]()
        self._turns = Counter[Resource]()       # latest turn of executions with each resource

    def gates(self, limits: Sequence[RateLimit], wakes: Sequence[Callable[[], None]]) -> list[RateGate]:
        """Create a gate for each limit; `wakes` are functions that make the waiting instance call enter() again.

        Raises
        ------
        ModelConfigError
            An instance needs more of a resource than there is.
        """
        for resource, count in (need for limit in limits for need in limit.needs.items()):
            if count > self._amounts.get(resource.name, count):
                raise ModelConfigError(
                    f"instance_group.rate_limiter: it needs {count} of '{resource.name}', and there are "
                    f"{self._amounts[resource.name]}: give --rate-limit-resource {resource.name}:{count}, or more")
        gates = [RateGate(self, limit, wake) for limit, wake in zip(limits, wakes, strict=True)]
        with self._lock:
            self._gates.update(dict.fromkeys(gates))
        return gates

    def enter(self, gate: RateGate) -> bool:
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

    def leave(self, gate: RateGate) -> None:
        with self._lock:
            self._used.subtract(gate.limit.needs)
        self._wake()

    def step_aside(self, gate: RateGate) -> None:
        with self._lock:
            if not gate.in_line:
                return
            gate.in_line = False
        self._wake()

    def close(self, gate: RateGate) -> None:
        with self._lock:
            del self._gates[gate]
        self._wake()

    def _begin(self, gate: RateGate) -> None:
        """Put a gate in line at the latest turn of its resources, and advance all of them to that turn.

        Otherwise all turns of the other resources up to there would come before it.
        """
        now = max((self._turns[resource] for resource in gate.limit.needs), default=0)
        self._turns.update({resource: now - self._turns[resource] for resource in gate.limit.needs})
        gate.in_line, gate.turn = True, max(gate.turn, now)

    def _total(self, resource: Resource) -> int:
        return self._amounts.get(resource.name) or max(gate.limit.needs.get(resource, 0) for gate in self._gates)

    def _line(self) -> list[RateGate]:
        return sorted((gate for gate in self._gates if gate.in_line), key=lambda gate: gate.turn)

    def _wake(self) -> None:
        with self._lock:
            line = self._line()
        for gate in line:
            gate.wake()
