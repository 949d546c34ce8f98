"""History of each model's request rate and latency, sampled from its counters, with bounded memory."""
from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from infer_server.batching.statistics import Statistics, Totals
from infer_server.repository.model import Model

INTERVAL_SECS = 10.0
_SAMPLES = 60                   # samples kept for each model: ten minutes
MAX_MODELS = 500                # limit of models with a history, and of rows on the status page


class _Series:
    """Samples of one loaded version of a model."""

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self._before: Totals = statistics.totals()
        self.rates, self.failures, self.latencies_ms = array("d"), array("d"), array("d")

    def sample(self, secs: float) -> None:
        before, self._before = self._before, self.statistics.totals()
        requests = self._before.requests - before.requests
        latency_ms = (self._before.ns - before.ns) / 1e6 / requests if requests else 0.0
        for values, value in ((self.rates, requests / secs), (self.latencies_ms, latency_ms),
                              (self.failures, (self._before.failures - before.failures) / secs)):
            values.append(value)
            del values[:-_SAMPLES]


class History:
    """Sampler that runs every INTERVAL_SECS. Belongs to the event loop."""

    def __init__(self, models: Callable[[], Iterable[Model]]) -> None:
        self._models = models
        self._series: dict[tuple[str, int], _Series] = {}
        self._loop = asyncio.get_running_loop()
        self._sampled_at = time.monotonic()
        self._timer = self._loop.call_later(INTERVAL_SECS, self._tick)

    def close(self) -> None:
        self._timer.cancel()

    def sample(self) -> None:
        now = time.monotonic()
        secs, self._sampled_at = max(1e-3, now - self._sampled_at), now
        series: dict[tuple[str, int], _Series] = {}
        for model in self._models():
            key = (model.name, model.version)
            one = self._series.get(key)
            if one is None or one.statistics is not model.statistics:       # reloaded: its counters begin at zero
                if len(series) >= MAX_MODELS:
                    continue
                one = _Series(model.statistics)
            else:
                one.sample(secs)
            series[key] = one
        self._series = series

    def as_json(self) -> dict[str, Any]:
        """Return the samples of models that had requests, oldest first."""
        return {"interval_secs": INTERVAL_SECS, "models": [
            {"name": name, "version": str(version), "rates": _rounded(one.rates), "failures": _rounded(one.failures),
             "latencies_ms": _rounded(one.latencies_ms)}
            for (name, version), one in self._series.items() if any(one.rates) or any(one.failures)]}

    def _tick(self) -> None:
        self.sample()
        self._timer = self._loop.call_later(INTERVAL_SECS, self._tick)


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
