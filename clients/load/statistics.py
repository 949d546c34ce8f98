"""Server-side statistics of an interval: the difference of two readings of ModelStatistics."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from infer_server.protos import inference as pb

NS_PER_MS = 1e6
PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class Reading:
    """Cumulative counts, summed over the versions of a model. Phase -> (requests, nanoseconds)."""
    phases: Mapping[str, tuple[int, int]]
    inferences: int
    executions: int
    batches: Counter[int]               # batch size -> executions


@dataclass(frozen=True)
class ServerSplit:
    """Mean times of a request in the server (ms), and the sizes of its batches."""
    queue_ms: float
    compute_input_ms: float
    compute_infer_ms: float
    compute_output_ms: float
    executions: int
    mean_batch: float
    batch_sizes: Mapping[int, int]      # batch size -> executions, by size


def read(statistics: Iterable[pb.ModelStatistics]) -> Reading:
    """Return the sum of the entries of a ModelStatistics response."""
    entries = list(statistics)
    durations = {phase: [getattr(entry.inference_stats, phase) for entry in entries] for phase in PHASES}
    batches: Counter[int] = Counter()
    for entry in entries:
        for batch in entry.batch_stats:
            batches[batch.batch_size] += batch.compute_infer.count
    return Reading({phase: (sum(d.count for d in every), sum(d.ns for d in every))
                    for phase, every in durations.items()},
                   sum(entry.inference_count for entry in entries), sum(entry.execution_count for entry in entries),
                   batches)


def difference(before: Reading, after: Reading) -> ServerSplit | None:
    """Return the statistics between two readings; None if nothing was executed."""
    executions = after.executions - before.executions
    if not executions:
        return None

    def mean_ms(phase: str) -> float:
        (count0, ns0), (count1, ns1) = before.phases[phase], after.phases[phase]
        return (ns1 - ns0) / (count1 - count0) / NS_PER_MS if count1 > count0 else 0.0

    batches = after.batches - before.batches
    return ServerSplit(queue_ms=mean_ms("queue"), compute_input_ms=mean_ms("compute_input"),
                       compute_infer_ms=mean_ms("compute_infer"), compute_output_ms=mean_ms("compute_output"),
                       executions=executions, mean_batch=(after.inferences - before.inferences) / executions,
                       batch_sizes={size: batches[size] for size in sorted(batches)})
