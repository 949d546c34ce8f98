"""Growth of ranges with the number of calibration items: ranges that still grow at the end need more items."""
from __future__ import annotations

from collections.abc import Mapping

from infer_server.calibration.histogram import Histogram

LAST = 0.25         # share of the items, at the end, in which ranges should not grow
GROWTH = 0.2        # share of its width by which a range must grow there to count
GROWING = 0.1       # share of the tensors that must grow for a warning
STEP = 1.1          # factor of the number of items between two recordings


class Growth:
    """Recorder of the extremes of tensors after more and more items.

    On MobileNetV2 with 64 photos no range grows by more than GROWTH in the last quarter.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[int, dict[str, tuple[float, float]]]] = []
        self._next = 1.0

    def record(self, items: int, histograms: Mapping[str, Histogram]) -> None:
        """Record the extremes after so many items; few recordings are kept, however many items there are."""
        if items >= self._next:
            self._marks.append((items, {name: (one.low, one.high) for name, one in histograms.items()}))
            self._next = items * STEP

    def warning(self, items: int, histograms: Mapping[str, Histogram]) -> str:
        """Return a warning if ranges grew in the last of so many items, else ""."""
        before = [mark for mark in self._marks if mark[0] <= (1.0 - LAST) * items]
        if not before:
            return ""
        count, extremes = before[-1]
        grown = {name: 1.0 - (extremes[name][1] - extremes[name][0]) / (one.high - one.low)
                 for name, one in histograms.items() if one.high > one.low}
        growing = {name: share for name, share in grown.items() if share > GROWTH}
        if len(growing) <= GROWING * len(grown):
            return ""
        most = max(growing, key=lambda name: growing[name])
        return (f"the ranges of {len(growing)} of {len(grown)} tensors grew by more than {100 * GROWTH:g} % in the "
                f"last {items - count} of {items} calibration items ('{most}' by {100 * growing[most]:.0f} %): give "
                "more items, or check whether the last ones are unlike the others")
