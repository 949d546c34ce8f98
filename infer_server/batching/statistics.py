"""What a model has done so far: plain counters that both ModelStatistics and the metrics endpoint read.

Counts and durations mean what Triton's mean (docs/protocol/extension_statistics.md): durations of a batch are
counted once for each of its requests in the totals, and once an execution in the statistics by batch size.
"""
from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Failure(Enum):
    """Why a request was not answered; the values of the label `reason` in the metrics."""
    REJECTED = "REJECTED"       # queue full, or expired while it waited
    CANCELED = "CANCELED"       # its client no longer waits: it gave up, or its deadline passed during the execution
    BACKEND = "BACKEND"         # the engine failed
    OTHER = "OTHER"


@dataclass
class Duration:
    count: int = 0
    ns: int = 0

    def add(self, count: int, ns: int) -> None:
        self.count += count
        self.ns += ns


@dataclass
class BatchStatistics:
    """Executions of one batch size."""
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass
class Counters(BatchStatistics):
    """Executions of all batch sizes, their durations counted for each request: a snapshot, or the running state."""
    last_inference_ms: int = 0                  # since the epoch
    inference_count: int = 0                    # items
    execution_count: int = 0                    # batches
    success: Duration = field(default_factory=Duration)
    failures: dict[Failure, int] = field(default_factory=lambda: dict.fromkeys(Failure, 0))
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchExecution:
    """The times of one batch, all from the same clock."""
    items: int
    started_ns: int                             # the batch was taken from the queue
    copied_ns: int                              # its inputs are in their slots
    computed_ns: int
    encoded_ns: int                             # its responses are ready


class Statistics:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters()

    def executed(self, execution: BatchExecution, enqueued_ns: Sequence[int]) -> None:
        """Counts an executed batch. enqueued_ns: when those of its requests that were answered in time were queued."""
        e, c, requests = execution, self._counters, len(enqueued_ns)
        with self._lock:
            batch = c.batches.setdefault(e.items, BatchStatistics())
            c.last_inference_ms = time.time_ns() // 1_000_000
            c.inference_count += e.items
            c.execution_count += 1
            for since_ns in enqueued_ns:
                c.queue.add(1, e.started_ns - since_ns)
                c.success.add(1, e.encoded_ns - since_ns)
            for total, of_size, ns in (
                    (c.compute_input, batch.compute_input, e.copied_ns - e.started_ns),
                    (c.compute_infer, batch.compute_infer, e.computed_ns - e.copied_ns),
                    (c.compute_output, batch.compute_output, e.encoded_ns - e.computed_ns)):
                total.add(requests, ns * requests)
                of_size.add(1, ns)

    def answered(self, enqueued_ns: Sequence[int], now_ns: int) -> None:
        """Counts requests whose last responses came after the execution that began them."""
        with self._lock:
            for since_ns in enqueued_ns:
                self._counters.success.add(1, now_ns - since_ns)

    def failed(self, reason: Failure, ns: int) -> None:
        """Counts a request that ended without an answer, `ns` after it was received."""
        with self._lock:
            self._counters.failures[reason] += 1
            self._counters.fail.add(1, ns)

    def snapshot(self) -> Counters:
        with self._lock:
            return copy.deepcopy(self._counters)
