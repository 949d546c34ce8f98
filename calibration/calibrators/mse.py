"""Mean-squared-error calibration: the range whose 8-bit levels are nearest to the values, on average.

With levels a step s = (high - low) / 255 apart, a value
    beyond the outermost levels, above high - s/2 (or below low + s/2), is stored as that level:    error (x - high)**2
    within s/2 of zero is stored as zero:                                                           error x**2
    anywhere else is uniform between two levels:                                                    error s**2 / 12
Each sum is a polynomial in the running sums of 1, x and x**2 over the histogram, so that one candidate costs a few
lookups and the whole grid of (low, high) can be tried.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infer_server.calibration.histogram import Floats, Histogram, Range

STEPS = 255             # steps between the 256 levels of a byte
CANDIDATES = 128        # candidates for each end of the range


@dataclass(frozen=True)
class MeanSquaredError:
    """MSE calibrator: the best of CANDIDATES x CANDIDATES ranges (CANDIDATES if all values have one sign)."""

    def range(self, histogram: Histogram) -> Range:
        if histogram.magnitude == 0.0:
            return 0.0, 0.0
        shares = np.linspace(0.0, 1.0, CANDIDATES + 1)[1:]
        lows = histogram.low * shares if histogram.low < 0.0 else np.zeros(1)
        highs = histogram.high * shares if histogram.high > 0.0 else np.zeros(1)
        low, high = (axis.ravel() for axis in np.meshgrid(lows, highs))
        best = int(np.argmin(squared_error(histogram, low, high)))
        return float(low[best]), float(high[best])


def squared_error(histogram: Histogram, low: Floats, high: Floats) -> Floats:
    """Return the total squared error of 8-bit quantisation for each range (low[i], high[i]), float64 [candidates]."""
    edges, counts = histogram.edges, histogram.counts
    centres = (edges[:-1] + edges[1:]) / 2
    running = np.stack([np.concatenate([[0.0], np.cumsum(counts * centres ** power)]) for power in range(3)])

    def below(x: Floats) -> Floats:
        """Return the sums of 1, v and v**2 over the values v below x, float64 [3, candidates]."""
        return np.stack([np.interp(x, edges, sums) for sums in running])

    def stored_as(level: Floats, moments: Floats) -> Floats:
        """Return the squared error of values with these moments if all are stored as `level`."""
        n, first, second = moments
        error: Floats = second - 2 * level * first + level ** 2 * n
        return error

    half = (high - low) / STEPS / 2
    too_high = running[:, -1:] - below(high - half)
    too_low = below(low + half)
    near_zero = below(np.minimum(half, high - half)) - below(np.maximum(-half, low + half))
    between = running[0, -1] - too_high[0] - too_low[0] - near_zero[0]
    result: Floats = (stored_as(high, too_high) + stored_as(low, too_low) + near_zero[2]
                      + between * (2 * half) ** 2 / 12)
    return result
