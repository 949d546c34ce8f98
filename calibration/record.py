"""Record of a calibration for reports: trials of the search with their errors, and compressed histograms.

A plan keeps it in its metadata: up to MOST_TRIALS and MOST_HISTOGRAMS of them, 170 KB.
"""
from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from infer_server.calibration.accuracy.comparison import Errors
from infer_server.calibration.calibrators import Range
from infer_server.calibration.histogram import Histogram

BINS = 128              # bins of a compressed histogram
MOST_HISTOGRAMS, MOST_TRIALS = 300, 150
LONGEST = 120           # characters of a trial's label


class SearchRecord:
    """Mutable record of the trials of a search, in their order."""

    def __init__(self) -> None:
        self._trials: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, stage: str, label: str, errors: Errors) -> None:
        """Add a trial. A trial that is known by its stage and label is left as it is."""
        top1 = {} if errors.top1 is None else {"top1": round(errors.top1, 4)}
        self._trials.setdefault((stage, label), {
            "stage": stage, "trial": label[:LONGEST], "peak_db": round(errors.peak_db, 3),
            "sqnr_db": round(errors.sqnr_db, 3), "cosine": round(errors.cosine, 6), **top1, "kept": False})

    def keep(self, stage: str, label: str) -> None:
        """Mark a trial as one whose result the search kept."""
        if (stage, label) in self._trials:
            self._trials[stage, label]["kept"] = True

    def as_json(self) -> list[dict[str, Any]]:
        """Return the first MOST_TRIALS trials with their errors."""
        return list(self._trials.values())[:MOST_TRIALS]


def histograms_json(histograms: Mapping[str, Histogram], ranges: Mapping[str, Range]) -> dict[str, Any]:
    """Return compressed histograms by tensor, of the first MOST_HISTOGRAMS, with the chosen ranges.

    "bins" are BINS bytes in base64: 255 * log(1 + count) / log(1 + largest count) over [low, high]. "clipped" is the
    share of the values outside of the range.
    """
    return {name: _compressed(histogram, ranges[name]) for name, histogram in list(histograms.items())[:MOST_HISTOGRAMS]
            if name in ranges and histogram.count}


def _compressed(histogram: Histogram, range_: Range) -> dict[str, Any]:
    below = np.concatenate([[0], np.cumsum(histogram.counts)])
    low, high = histogram.low, max(histogram.high, histogram.low + 1e-30)
    share = np.interp(np.linspace(low, high, BINS + 1), histogram.edges, below)
    share[0], share[-1] = 0.0, histogram.count      # the largest value is inside the last bin, not at its end
    heights = np.log1p(np.diff(share))
    bins = np.rint(255.0 * heights / (heights.max() or 1.0)).astype(np.uint8)
    width = histogram.edges[1] - histogram.edges[0]     # the bins of the ends are inside: clipping there is rounding
    inside = np.diff(np.interp((range_[0] - width, range_[1] + width), histogram.edges, below))[0]
    clipped = max(1.0 - inside / histogram.count, 0.0)
    return {"low": float(f"{low:.6g}"), "high": float(f"{high:.6g}"), "range": [float(f"{end:.6g}") for end in range_],
            "clipped": float(f"{clipped:.3g}"), "bins": base64.b64encode(bins.tobytes()).decode()}
