"""Min-max calibration: the range covers all values, which suits tensors without outliers."""
from __future__ import annotations

from dataclasses import dataclass

from infer_server.calibration.histogram import Histogram, Range


@dataclass(frozen=True)
class MinMax:
    """Min-max calibrator: the range of all values. An outlier reduces the resolution of all others."""

    def range(self, histogram: Histogram) -> Range:
        """Return the smallest and largest value, extended to include zero."""
        return histogram.low, histogram.high
