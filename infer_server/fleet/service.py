"""Service times: how long an instance takes for a batch, by its size, and how much that varies."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infer_server.engines.errors import ConfigError, InputError
from infer_server.engines.ir.graph import Array

USUAL_SPREAD = 0.08         # standard deviation of the logarithm of a time where none was measured
TOLERANCE = 1.05            # as infer_server.batching.batch_times: a smaller batch within this factor is preferred
OVERHEAD = 1e-4             # seconds of a batch in addition to its execution; as in batch_times, too
QUANTILES = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class ServiceTimes:
    """Times of batches, linear between the known sizes and beyond them.

    sizes    ascending numbers of items
    seconds  mean time of each
    spread   quantiles (0 to 1 in equal steps) of a time over its mean, the same for all sizes; its mean is 1
    source   text that says where the times come from
    """
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.sizes or min(self.seconds) <= 0:
            raise ConfigError(f"{self.source}: times of batches must be above 0")

    def of(self, items: int) -> float:
        """Return the mean seconds of a batch."""
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1:
            return seconds[0] * items / sizes[0]
        if items > sizes[-1]:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            return max(seconds[-1], seconds[-1] + slope * (items - sizes[-1]))
        return float(np.interp(items, sizes, seconds)) if items > sizes[0] else seconds[0]

    def paying_batch(self, most: int) -> int:
        """Return the batch size that servers stop at: the smallest class whose time an item is within 5 % of the best.

        Classes are 1, 2, 4, ..., `most`, as of AdaptiveBatchLimit, which measures them.
        """
        classes = [*(1 << power for power in range((most - 1).bit_length())), most]
        cost = {size: (self.of(size) + OVERHEAD) / size for size in classes}
        best = min(cost.values()) * TOLERANCE
        return min(size for size in classes if cost[size] <= best)

    def capacity(self, batch: int) -> float:
        """Return the items a second of an instance that is always busy with such batches."""
        return batch / self.of(batch)

    def draws(self, random: np.random.Generator, count: int) -> Array:
        """Return factors of times at random."""
        drawn: Array = np.interp(random.random(count), np.linspace(0, 1, len(self.spread)), self.spread)
        return drawn


def lognormal(deviation: float = USUAL_SPREAD) -> tuple[float, ...]:
    """Return the quantiles of a lognormal distribution of mean 1, by a fixed sample."""
    sample = np.exp(np.random.default_rng(0).standard_normal(20_001) * deviation)
    return _quantiles(sample)


def _quantiles(sample: Array) -> tuple[float, ...]:
    quantiles = np.quantile(sample / sample.mean(), QUANTILES)
    # The mean of draws is that of the trapezoids between quantiles.
    return tuple(map(float, quantiles / ((quantiles[1:] + quantiles[:-1]) / 2).mean()))


def stated(item_ms: float, fixed_ms: float, most: int, deviation: float = USUAL_SPREAD) -> ServiceTimes:
    """Return times of fixed_ms + items * item_ms milliseconds."""
    sizes = (1, max(2, most))
    return ServiceTimes(sizes, tuple((fixed_ms + size * item_ms) / 1e3 for size in sizes), lognormal(deviation),
                        f"{item_ms:g} ms an item and {fixed_ms:g} ms a batch, as given")


def measured(times: Mapping[int, Array], source: str) -> ServiceTimes:
    """Return measured times, {batch size: seconds of each run}, and their spread over the mean of their size."""
    sizes = sorted(times)
    spread = np.concatenate([times[size] / times[size].mean() for size in sizes])
    return ServiceTimes(tuple(sizes), tuple(float(times[size].mean()) for size in sizes), _quantiles(spread), source)


def read_times(paths: Sequence[Path]) -> ServiceTimes:
    """Read times from JSON: outputs of run-engine --json, one for each batch size, or a model's statistics.

    Raises InputError if a file is neither.
    """
    seconds, spread = dict[int, float](), lognormal()
    for path in paths:
        try:
            document = json.loads(path.read_bytes())
            if "latency_ms" in document:
                latency = document["latency_ms"]
                if document["batch"] <= min(seconds, default=document["batch"]):
                    spread = _quantiles_of_percentiles(latency)
                seconds[int(document["batch"])] = latency["mean"] / 1e3
            else:
                seconds |= _times_of_statistics(document)
        except (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError) as error:
            raise InputError(f"{path} is neither run-engine's --json nor statistics of one model: "
                             f"{type(error).__name__}: {error}") from error
    sizes = sorted(seconds)
    return ServiceTimes(tuple(sizes), tuple(seconds[size] for size in sizes), spread, ", ".join(map(str, paths)))


def _quantiles_of_percentiles(latency: Mapping[str, float]) -> tuple[float, ...]:
    known = [(0.0, "min"), (0.5, "p50"), (0.9, "p90"), (0.95, "p95"), (0.99, "p99"), (1.0, "p99")]
    levels = np.linspace(0, 1, 2001)
    return _quantiles(np.interp(levels, [level for level, _ in known], [latency[name] for _, name in known]))


def _times_of_statistics(document: Mapping[str, Any]) -> dict[int, float]:
    """Return the mean seconds by batch size of a model's statistics, /v2/models/NAME/stats."""
    (model,) = document["model_stats"]
    times = {}
    for batch in model["batch_stats"]:
        parts = [batch[name] for name in ("compute_input", "compute_infer", "compute_output")]
        times[int(batch["batch_size"])] = sum(int(part["ns"]) / int(part["count"]) for part in parts) / 1e9
    return times
