"""What a calibrator is: a frozen rule from a tensor's histogram to the range that its stored integers shall span."""
from __future__ import annotations

from typing import Protocol

from calibration.histogram import Histogram

Range = tuple[float, float]     # (low, high), real values, low <= 0 <= high


class Calibrator(Protocol):
    def range(self, histogram: Histogram) -> Range:
        """(low, high) for a tensor; low == high == 0 if it never was anything but zero."""
        ...
