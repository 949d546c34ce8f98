"""Streaming histogram of a tensor's values, from which all calibrators compute ranges after one pass over the data.

There are 2 * BINS_PER_SIDE bins over [-2**e, 2**e), where e is the smallest exponent that covers every value. When a
larger value arrives, the range doubles until it fits and neighbouring bins are merged. A bin is the union of two bins
of the finer grid, and scaling by a power of two is exact. Therefore the counts equal those of a histogram with the
final range from the start, and do not depend on the order of values or the batch size.

(NVIDIA's calibrators rescale from the range of the first batch, and so depend on it: TensorRT issue 1411.)
"""
from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.errors import CalibrationError
from infer_server.engines.ir.graph import Array

BINS_PER_SIDE = 1 << 14         # 256 KiB a tensor; at least 4 bins for each of the 2048 of NVIDIA's talk S7310
PIECE = 1 << 18                 # values counted at once, so that temporaries stay in the caches
SMALLEST_EXPONENT = -100        # minimum of e, which keeps bins / range finite in float32
LARGEST_EXPONENT = 128          # float32 values are below 2**128
BYTES = 2 * BINS_PER_SIDE * 8   # of the counts

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
        # bincount takes three times as long for another integer type.
        self.counts += np.bincount(bins.astype(np.intp), minlength=self.counts.size)

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

    @staticmethod
    def of(counts: NDArray[np.int64], exponent: int, low: float, high: float) -> Histogram:
        """Return the histogram with these counts, exponent and extremes of the values."""
        histogram = Histogram()
        histogram.counts, histogram.exponent, histogram.count = counts, exponent, int(counts.sum())
        histogram._min, histogram._max = low, high
        return histogram

    @property
    def extremes(self) -> Range:
        """Smallest and largest value."""
        return self._min, self._max

    def merged(self, other: Histogram) -> Histogram:
        """Return the histogram of the values of both: equal to one that observed all of them."""
        exponent = max(self.exponent, other.exponent)
        return Histogram.of(self._counts_at(exponent) + other._counts_at(exponent), exponent,
                            min(self._min, other._min), max(self._max, other._max))

    def _counts_at(self, exponent: int) -> NDArray[np.int64]:
        """Return the counts with the bins of a range that is at least as large."""
        copy = Histogram()
        copy.counts, copy.exponent = self.counts, self.exponent
        copy._widen(exponent)
        return copy.counts

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


# ---- JSON
def histogram_to_json(histogram: Histogram) -> dict[str, Any]:
    """Return a histogram as JSON: the counts of the bins as little-endian int64, by zlib, in base64."""
    counts = zlib.compress(histogram.counts.astype("<i8").tobytes(), 9)
    return {"exponent": histogram.exponent, "extremes": list(histogram.extremes) if histogram.count else [],
            "counts": base64.b64encode(counts).decode()}


def histogram_of(document: Mapping[str, Any]) -> Histogram:
    """Return the histogram of its JSON. Raises ValueError if it is not one."""
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(document["counts"], validate=True), BYTES + 1)
        exponent, extremes = int(document["exponent"]), [float(value) for value in document["extremes"]]
    except (KeyError, TypeError, binascii.Error, zlib.error) as error:
        raise ValueError(f"a histogram needs exponent, extremes and counts ({error})") from error
    counts = np.frombuffer(data, "<i8").astype(np.int64) if len(data) == BYTES else np.zeros(0, np.int64)
    limit = 2.0 ** exponent if SMALLEST_EXPONENT <= exponent <= LARGEST_EXPONENT else 0.0
    if not len(counts) or (counts < 0).any() or len(extremes) != 2 * counts.any() or (
            extremes and not -limit <= extremes[0] <= extremes[1] < limit):
        raise ValueError("counts, exponent and extremes of a histogram do not fit")
    return Histogram.of(counts, exponent, *(extremes or (math.inf, -math.inf)))
