"""Min-max calibration: all values are kept, which suits tensors without outliers."""
from __future__ import annotations

from dataclasses import dataclass

from calibration.histogram import Histogram, Range


@dataclass(frozen=True)
class MinMax:
    """The range of all values seen: one outlier costs every other value resolution."""

    def range(self, histogram: Histogram) -> Range:
        """(least, largest value seen), widened to hold zero."""
        return histogram.low, histogram.high
