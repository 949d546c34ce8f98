"""Percentile calibration: clip a fixed share of the values, the most extreme ones."""
from __future__ import annotations

from dataclasses import dataclass

from infer_server.calibration.histogram import Histogram, Range
from infer_server.engines.errors import ConfigError


@dataclass(frozen=True)
class Percentile:
    """Percentile calibrator: keeps `percentile` per cent of the values.

    The rest is clipped at the top of a one-sided tensor, or equally at both ends of a signed one. Raises ConfigError
    unless 50 < percentile <= 100.
    """
    percentile: float = 99.99

    def __post_init__(self) -> None:
        if not 50.0 < self.percentile <= 100.0:
            raise ConfigError(f"percentile {self.percentile:g}: must be above 50 and at most 100, for instance 99.99")

    def range(self, histogram: Histogram) -> Range:
        cut = 1.0 - self.percentile / 100.0
        low, high = histogram.low, histogram.high
        if low < 0.0 < high:
            cut /= 2
        return (min(histogram.quantile(cut), 0.0) if low < 0.0 else 0.0,
                max(histogram.quantile(1.0 - cut), 0.0) if high > 0.0 else 0.0)
