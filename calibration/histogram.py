"""Streaming histogram of a tensor's values, from which all calibrators compute ranges after one pass over the data.

There are 2 * BINS_PER_SIDE bins over [-2**e, 2**e), where e is the smallest exponent that covers every value. When a
larger value arrives, the range doubles until it fits and neighbouring bins are merged. A bin is the union of two bins
of the finer grid, and scaling by a power of two is exact. Therefore the counts equal those of a histogram with the
final range from the start, and do not depend on the order of values or the batch size.

(NVIDIA's calibrators rescale from the range of the first batch, and so depend on it: TensorRT issue 1411.)
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.errors import CalibrationError
from infer_server.engines.ir.graph import Array

BINS_PER_SIDE = 1 << 14         # 256 KiB a tensor; at least 4 bins for each of the 2048 of NVIDIA's talk S7310
PIECE = 1 << 18                 # values counted at once, so that temporaries stay in the caches
SMALLEST_EXPONENT = -100        # minimum of e, which keeps bins / range finite in float32

Floats = NDArray[np.float64]
Range = tuple[float, float]     # (low, high) of a tensor's real values, low <= 0 <= high


class Histogram:
    """Mutable histogram with the extremes and the number of the observed values.

    counts      int64 [2 * BINS_PER_SIDE]; bin i holds values in [edges[i], edges[i + 1])
    exponent    the range is [-2**exponent, 2**exponent)
    """

    def __init__(self) -> None:
        self.counts = np.zeros(2 * BINS_PER_SIDE, np.int64)
        self.exponent = SMALLEST_EXPONENT
        self.count = 0
        self._min, self._max = np.inf, -np.inf

    def observe(self, values: Array) -> None:
        """Add the values of an array of any shape, strides and real dtype.

        Raises CalibrationError on NaN or infinity.
        """
        pieces = np.nditer(values, ["buffered", "external_loop", "zerosize_ok"], ["readonly"], np.float32, order="K",
                           casting="unsafe", buffersize=PIECE)
        with pieces:
            for piece in cast(Iterable[Array], pieces if values.size else ()):
                low, high = float(piece.min()), float(piece.max())
                if not np.isfinite(low) or not np.isfinite(high):       # min and max propagate NaN
                    count = np.count_nonzero(~np.isfinite(values))
                    raise CalibrationError(f"{count} of {values.size} values are not finite")
                self._min, self._max = min(self._min, low), max(self._max, high)
                self._add(piece)

    def _add(self, flat: Array) -> None:
        self.count += flat.size
        if self.magnitude:
            self._widen(int(np.frexp(self.magnitude)[1]))       # frexp: magnitude < 2**exponent, strictly
        scaled = flat * np.float32(BINS_PER_SIDE * 2.0 ** -self.exponent)
        bins = np.floor(scaled, out=scaled)
        bins += np.float32(BINS_PER_SIDE)       # exact: whole numbers below 2**24
        self.counts += np.bincount(bins.astype(np.int32), minlength=self.counts.size)

    def _widen(self, exponent: int) -> None:
        """Merge neighbouring bins until the range is at least [-2**exponent, 2**exponent)."""
        while self.exponent < exponent:
            if not self.counts.any():
                self.exponent = exponent
                return
            merged = np.zeros_like(self.counts)
            quarter = BINS_PER_SIDE // 2
            merged[quarter:3 * quarter] = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts, self.exponent = merged, self.exponent + 1

    @property
    def _width(self) -> float:
        return float(2.0 ** self.exponent) / BINS_PER_SIDE

    # ---- interface for calibrators
    @property
    def low(self) -> float:
        """Smallest value, at most 0: every range includes zero, which padding and ReLU need exactly."""
        return min(self._min, 0.0)

    @property
    def high(self) -> float:
        """Largest value, at least 0."""
        return max(self._max, 0.0)

    @property
    def magnitude(self) -> float:
        """Largest |x|."""
        return max(-self.low, self.high)

    @property
    def edges(self) -> Floats:
        """Edges of the bins, float64 [2 * BINS_PER_SIDE + 1]."""
        return np.arange(-BINS_PER_SIDE, BINS_PER_SIDE + 1, dtype=np.float64) * self._width

    def quantile(self, fraction: float) -> float:
        """Return the value below which `fraction` of all values lie, interpolated linearly in its bin."""
        below = np.concatenate([[0], np.cumsum(self.counts)])
        target = fraction * self.count
        bin_ = int(np.clip(np.searchsorted(below, target, side="left") - 1, 0, self.counts.size - 1))
        inside = (target - below[bin_]) / max(self.counts[bin_], 1)
        value = self.edges[bin_] + inside * self._width
        return float(np.clip(value, self._min, self._max))

    def magnitudes(self, bins: int) -> Floats:
        """Return the histogram of |x| in `bins` equal bins over [0, magnitude], float64 [bins].

        It sums to the number of values. Bins that cross an edge of the new bins are divided in proportion, so counts
        may be fractions.
        """
        positive, negative = self.counts[BINS_PER_SIDE:], self.counts[BINS_PER_SIDE - 1::-1]
        below = np.concatenate([[0], np.cumsum(positive + negative)])
        grid = self.edges[BINS_PER_SIDE:]
        edges = np.linspace(0.0, self.magnitude, bins + 1)
        share = np.interp(edges, grid, below)
        share[-1] = self.count          # the largest value is inside the last bin, not at its end
        return np.diff(share)
