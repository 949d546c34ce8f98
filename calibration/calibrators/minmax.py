"""Min-max calibration: the range of all values seen. Nothing is clipped; one outlier costs everybody resolution."""
from __future__ import annotations

from dataclasses import dataclass

from calibration.calibrators.base import Range
from calibration.histogram import Histogram


@dataclass(frozen=True)
class MinMax:
    def range(self, histogram: Histogram) -> Range:
        """(least, largest value seen), widened to hold zero."""
        return histogram.low, histogram.high
