"""Count the requests and executions of a model, for ModelStatistics and the metrics endpoint.

Counts and durations are defined as in Triton (docs/protocol/extension_statistics.md): the durations of a batch count
once for each of its requests in the totals, and once per execution in the statistics by batch size.
"""
from __future__ import annotations

import copy
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import sub
from typing import NamedTuple

from infer_server.batching.batch_times import size_bucket
from infer_server.observing.closing import FREE, REASONS
from infer_server.observing.latencies import Latencies

ANSWERED_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)     # histogram bounds in ms
PHASES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
CACHE_PHASES = ("cache_hit", "cache_miss")


class Failure(Enum):
    """Reason why a request failed; the values are those of the metrics' label `reason`."""
    REJECTED = "REJECTED"       # the queue was full, or the request expired in it
    CANCELED = "CANCELED"       # the client cancelled, or its deadline passed during the execution
    BACKEND = "BACKEND"         # the engine failed
    OTHER = "OTHER"


@dataclass
class Duration:
    """Number of events and the sum of their durations in ns."""
    count: int = 0
    ns: int = 0

    def add(self, count: int, ns: int) -> None:
        self.count += count
        self.ns += ns


@dataclass
class BatchStatistics:
    """Durations of the executions of one batch size."""
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass
class Executions:
    """Numbers of items and batches executed on one device."""
    items: int = 0
    batches: int = 0


@dataclass
class Counters(BatchStatistics):
    """Counters of a model over all batch sizes: a snapshot, or the running state."""
    last_inference_ms: int = 0                  # time of the last execution in ms since the epoch
    used_ns: int = 0                            # time of the last execution on the monotonic clock
    inference_count: int = 0                    # executed items
    execution_count: int = 0                    # executed batches
    success: Duration = field(default_factory=Duration)
    failures: dict[Failure, int] = field(default_factory=lambda: dict.fromkeys(Failure, 0))
    fail: Duration = field(default_factory=Duration)
    responding_ns: int = 0                      # sum of the times between the first and last responses of requests
    queue: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)       # lookups that succeeded, with encoding
    cache_miss: Duration = field(default_factory=Duration)      # lookups that failed
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    devices: dict[int | None, Executions] = field(default_factory=dict)     # by GPU number; None is the CPU
    answered: list[int] = field(default_factory=lambda: [0] * (len(ANSWERED_MS) + 1))   # by time to the first response
    closed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))   # batches by closing reason


class BatchExecution(NamedTuple):
    """Times of one batch execution, all on the monotonic clock."""
    items: int
    enqueued_ns: int                            # the first request was queued
    started_ns: int                             # the batch was taken from the queue
    copied_ns: int                              # the inputs were copied
    computed_ns: int                            # the outputs were computed
    encoded_ns: int                             # the responses were encoded
    gpu: int | None = None                      # number of the GPU; None is the CPU
    apart_ns: tuple[int, ...] = ()              # queueing times of requests that are answered after the execution


class Totals(NamedTuple):
    """Cumulative counters of requests."""
    requests: int               # number of answered requests
    ns: int                     # sum of their durations
    failures: int
    queue_ns: int               # sum of the times that they waited


class Statistics:
    """Statistics of a model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters()
        self._latencies = {phase: Latencies() for phase in (*PHASES, *CACHE_PHASES)}

    def executed(self, execution: BatchExecution, enqueued_ns: Sequence[int], closed: str = FREE,
                 responding_ns: Sequence[int] = ()) -> None:
        """Count an executed batch.

        Parameters
        ----------
        execution : BatchExecution
            Times of the execution.
        enqueued_ns : sequence of int
            Queueing times of the requests that were answered in time.
        closed : str
            Reason why the batch was not larger.
        responding_ns : sequence of int
            See `answered`.
        """
        e, c, requests = execution, self._counters, len(enqueued_ns) + len(execution.apart_ns)
        with self._lock:
            c.closed[closed] += 1
            size = size_bucket(e.items, c.batches)
            batch = c.batches.get(size)
            if batch is None:
                batch = c.batches[size] = BatchStatistics()
            c.last_inference_ms, c.used_ns = time.time_ns() // 1_000_000, time.monotonic_ns()
            c.inference_count += e.items
            c.execution_count += 1
            device = c.devices.setdefault(e.gpu, Executions())
            device.items += e.items
            device.batches += 1
            waited_ns = [e.started_ns - since_ns for since_ns in (*enqueued_ns, *e.apart_ns)]
            c.queue.add(requests, sum(waited_ns))
            self._latencies["queue"].add(waited_ns, 1, e.encoded_ns)
            self._answered([e.encoded_ns - since_ns for since_ns in enqueued_ns], e.encoded_ns, responding_ns)
            for phase, total, of_size, ns in (
                    ("compute_input", c.compute_input, batch.compute_input, e.copied_ns - e.started_ns),
                    ("compute_infer", c.compute_infer, batch.compute_infer, e.computed_ns - e.copied_ns),
                    ("compute_output", c.compute_output, batch.compute_output, e.encoded_ns - e.computed_ns)):
                self._latencies[phase].add((ns,), requests, e.encoded_ns)
                total.count += requests
                total.ns += ns * requests
                of_size.count += 1
                of_size.ns += ns

    def looked_up(self, hit: bool, ns: int) -> None:
        """Count a lookup in the response cache. A hit is a success, but no execution."""
        now_ns = time.monotonic_ns()
        with self._lock:
            self._latencies["cache_hit" if hit else "cache_miss"].add((ns,), 1, now_ns)
            if hit:
                self._counters.cache_hit.add(1, ns)
                self._answered((ns,), now_ns)
            else:
                self._counters.cache_miss.add(1, ns)

    def answered(self, enqueued_ns: Sequence[int], now_ns: int, responding_ns: Sequence[int] = ()) -> None:
        """Count requests whose last responses came after the execution that began them.

        `responding_ns` has the time since the first response of each; it is empty if they had one response each.
        """
        with self._lock:
            self._answered([now_ns - since_ns for since_ns in enqueued_ns], now_ns, responding_ns)

    def _answered(self, times_ns: Sequence[int], now_ns: int, responding_ns: Sequence[int] = ()) -> None:
        self._counters.success.add(len(times_ns), sum(times_ns))
        self._counters.responding_ns += sum(responding_ns)
        answered = self._counters.answered
        first_ns = list(map(sub, times_ns, responding_ns)) if responding_ns else times_ns
        if first_ns and (column := bisect_left(ANSWERED_MS, min(first_ns) / 1e6)) == (
                bisect_left(ANSWERED_MS, max(first_ns) / 1e6)):
            answered[column] += len(first_ns)
        else:
            for ns in first_ns:
                answered[bisect_left(ANSWERED_MS, ns / 1e6)] += 1
        self._latencies["request"].add(times_ns, 1, now_ns)

    def failed(self, reason: Failure, ns: int) -> None:
        """Count a request that failed `ns` after it was received."""
        with self._lock:
            self._counters.failures[reason] += 1
            self._counters.fail.add(1, ns)

    def quantiles(self, levels: Sequence[float]) -> dict[str, list[float]]:
        """Return quantiles of the durations within the last minute in ns by phase, NaN without requests.

        `levels` are between 0 and 1 and ascending.
        """
        now_ns = time.monotonic_ns()
        with self._lock:
            return {phase: latencies.quantiles(levels, now_ns) for phase, latencies in self._latencies.items()}

    def totals(self) -> Totals:
        """Return the counters of requests alone, which is cheaper than a snapshot."""
        with self._lock:
            counters = self._counters
            return Totals(counters.success.count, counters.success.ns, counters.fail.count, counters.queue.ns)

    def snapshot(self) -> Counters:
        with self._lock:
            return copy.deepcopy(self._counters)
