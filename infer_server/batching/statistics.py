"""Count the requests and executions of a model, for ModelStatistics and the metrics endpoint.

Counts and durations are defined as in Triton (docs/protocol/extension_statistics.md): the durations of a batch count
once for each of its requests in the totals, and once per execution in the statistics by batch size.
"""
from __future__ import annotations

import copy
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import mul, sub
from typing import NamedTuple

from infer_server.batching.batch_times import size_bucket
from infer_server.observing.closing import FREE, REASONS
from infer_server.observing.latencies import Latencies

ANSWERED_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)     # histogram bounds in ms
PHASES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
CACHE_PHASES = ("cache_hit", "cache_miss")
_column_of = partial(bisect_left, [ms * 1_000_000 for ms in ANSWERED_MS])       # column of a time in ns
_MOST_PENDING = 64              # executions that are counted together
_PENDING_NS = 1_000_000_000     # and the time within which they ended


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


class _Record(NamedTuple):
    """Arguments of `Statistics.executed`."""
    execution: BatchExecution
    enqueued_ns: Sequence[int]
    closed: str
    responding_ns: Sequence[int]


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
        self._pending: list[_Record] = []       # executions that are not counted yet; counting many is cheaper

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
        with self._lock:
            pending = self._pending
            pending.append(_Record(execution, enqueued_ns, closed, responding_ns))
            if len(pending) >= _MOST_PENDING or (
                    execution.encoded_ns - pending[0].execution.encoded_ns > _PENDING_NS):
                self._count_pending()

    def _count_pending(self) -> None:
        """Add the pending executions to the counters. The lock is held."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        c, now_ns = self._counters, pending[-1].execution.encoded_ns
        c.last_inference_ms = (time.time_ns() - time.monotonic_ns() + now_ns) // 1_000_000
        c.used_ns = now_ns
        c.execution_count += len(pending)
        batches = []
        for e, _, closed, _ in pending:
            c.closed[closed] += 1
            c.inference_count += e.items
            device = c.devices.get(e.gpu) or c.devices.setdefault(e.gpu, Executions())
            device.items += e.items
            device.batches += 1
            size = size_bucket(e.items, c.batches)
            batches.append(c.batches.get(size) or c.batches.setdefault(size, BatchStatistics()))
        waited_ns = [e.started_ns - ns for e, enqueued_ns, _, _ in pending for ns in (*enqueued_ns, *e.apart_ns)]
        c.queue.add(len(waited_ns), sum(waited_ns))
        self._latencies["queue"].add(waited_ns, now_ns)
        self._answered([e.encoded_ns - ns for e, enqueued_ns, _, _ in pending for ns in enqueued_ns], now_ns,
                       [ns for record in pending for ns in record.responding_ns])
        requests = [len(enqueued_ns) + len(e.apart_ns) for e, enqueued_ns, _, _ in pending]
        _, _, started_ns, copied_ns, computed_ns, encoded_ns, _, _ = zip(*[e for e, _, _, _ in pending], strict=True)
        self._count_phase("compute_input", map(sub, copied_ns, started_ns), requests, batches, now_ns)
        self._count_phase("compute_infer", map(sub, computed_ns, copied_ns), requests, batches, now_ns)
        self._count_phase("compute_output", map(sub, encoded_ns, computed_ns), requests, batches, now_ns)

    def _count_phase(self, phase: str, durations_ns: Iterable[int], requests: Sequence[int],
                     batches: Iterable[BatchStatistics], now_ns: int) -> None:
        """Count the durations of a phase in several executions, each with its number of requests."""
        times_ns = list(durations_ns)
        self._latencies[phase].add(times_ns, now_ns, requests)
        total: Duration = getattr(self._counters, phase)
        total.add(sum(requests), sum(map(mul, times_ns, requests)))
        for batch, ns in zip(batches, times_ns, strict=True):
            of_size: Duration = getattr(batch, phase)
            of_size.count += 1
            of_size.ns += ns

    def looked_up(self, hit: bool, ns: int) -> None:
        """Count a lookup in the response cache. A hit is a success, but no execution."""
        now_ns = time.monotonic_ns()
        with self._lock:
            self._latencies["cache_hit" if hit else "cache_miss"].add((ns,), now_ns)
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
        for column, count in Counter(map(_column_of, map(sub, times_ns, responding_ns) if responding_ns else times_ns)
                                     ).items():
            answered[column] += count
        self._latencies["request"].add(times_ns, now_ns)

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
            self._count_pending()
            return {phase: latencies.quantiles(levels, now_ns) for phase, latencies in self._latencies.items()}

    def totals(self) -> Totals:
        """Return the counters of requests alone, which is cheaper than a snapshot."""
        with self._lock:
            self._count_pending()
            counters = self._counters
            return Totals(counters.success.count, counters.success.ns, counters.fail.count, counters.queue.ns)

    def snapshot(self) -> Counters:
        with self._lock:
            self._count_pending()
            return copy.deepcopy(self._counters)
