"""Autoscaling by ongoing requests and by load, as each replica reports them.

Serve samples how many requests its handlers have begun. Behind HAProxy, nobody counts those that wait for the event
loop of a replica, so that one which is saturated by the cost of small requests seems nearly idle.
"""
from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

from infer_server.endpoints.grpc.context import CallContext, Serve

ONGOING = "infer_ongoing"       # mean number of calls in progress
LOAD = "infer_load"             # 1.0 for a replica that can do no more
TARGET_LOAD = 0.7               # load of a replica that the policy aims at
_SCHEDULING = Path("/proc/thread-self/schedstat")   # ns on a core, ns of waiting for one, time slices


class Meter:
    """Meter of the calls and of the load of a server. Belongs to the event loop."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._ongoing = 0
        self._call_secs = 0.0           # sum of the times that calls have taken since the last reading
        self._last = self._times()
        self._counted_at = self._last[0]

    def counted(self, serve: Serve) -> Serve:
        """Return a method whose calls are counted."""
        async def call(context: CallContext) -> None:
            self._change(1)
            try:
                await serve(context)
            finally:
                self._change(-1)
        return call

    def read(self) -> dict[str, float]:
        """Return the means since the last reading, by the names of the metrics.

        The load is 1 if the event loop, or all cores together, were busy all the time. Time in which the event loop
        waits for a core counts as busy.
        """
        last, self._last = self._last, self._times()
        self._count_until(self._last[0])
        wall, loop, process = (now - before for now, before in zip(self._last, last, strict=True))
        call_secs, self._call_secs = self._call_secs, 0.0
        return {ONGOING: call_secs / wall, LOAD: max(loop, process / self._cores) / wall} if wall > 0 else {}

    def _change(self, count: int) -> None:
        self._count_until(time.monotonic())
        self._ongoing += count

    def _count_until(self, now: float) -> None:
        self._call_secs += self._ongoing * (now - self._counted_at)
        self._counted_at = now

    def _times(self) -> tuple[float, float, float]:
        on_core_ns, waiting_ns, _ = map(int, _SCHEDULING.read_text().split())
        return time.monotonic(), (on_core_ns + waiting_ns) / 1e9, time.process_time()


class Context(Protocol):
    """Interface of the argument that Serve passes to a policy: ray.serve.config.AutoscalingContext."""
    config: Any
    current_num_replicas: int
    target_num_replicas: int
    total_num_requests: float
    aggregated_metrics: Any         # values of each replica by the name of a metric


def replicas_for_load(context: Context) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas that the ongoing calls or the loads of the replicas require.

    Serve applies the delays, the factors and the limits of the autoscaling configuration to it.
    """
    if not context.current_num_replicas:
        return context.target_num_replicas, {}
    metrics = context.aggregated_metrics or {}
    ongoing = context.total_num_requests + sum(metrics.get(ONGOING, {}).values())   # those that Serve has handled
    return max(ongoing / context.config.get_target_ongoing_requests(),
               sum(metrics.get(LOAD, {}).values()) / TARGET_LOAD), {}
