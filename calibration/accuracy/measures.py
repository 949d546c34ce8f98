"""Measure how far a quantised model's outputs are from the float one's: SQNR, peak SNR, cosine, top-1 agreement."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.ir.graph import Array

POOR_DB = 6.0           # least acceptable SQNR: the error is half as large as the signal
CLEAR_DB = 15.0         # SQNR from which values that became 0 are accepted
MOST_ZEROED = 0.5       # share of the values that may become 0 below CLEAR_DB


def sqnr_db(reference: Array, value: Array) -> float:
    """Return the signal to quantisation noise ratio in dB, 10 log10(sum r^2 / sum (r - v)^2); inf if equal.

    The arrays have one shape. 6 dB correspond to a bit; a layer's output in 8 bits has about 40 dB, a usable network
    output 15 to 30 dB.
    """
    return powers(reference, value).sqnr_db


def cosine(reference: Array, value: Array) -> float:
    """Return the cosine of the angle between two arrays as flat vectors; 1 if both are zero."""
    a, b = _comparable(reference, value)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else float(np.array_equal(a, b))


def top1_agreement(reference: Array, value: Array) -> float:
    """Return the share (0..1) of vectors along the last axis whose largest element has one index in both arrays."""
    return float(np.mean(np.argmax(reference, axis=-1) == np.argmax(value, axis=-1)))


def zeroed(reference: Array, value: Array) -> float:
    """Return the share (0..1) of the elements other than 0 that have become exactly 0; 0 if all were 0."""
    some = reference != 0
    return int(np.count_nonzero(some & (value == 0))) / max(int(np.count_nonzero(some)), 1)


def fault_of_int8(sqnr: float, zeroed_share: float) -> str:
    """Return why a quantised output, or a part of one, is too inexact; "" if it is not.

    Values that are small relative to the quantisation step become 0, while a few large ones keep the SQNR high, such as
    a detector's scores that share a range with its boxes.
    """
    if not sqnr >= POOR_DB:
        return f"its SQNR is {sqnr:.1f} dB; at least {POOR_DB:g} dB are wanted"
    if zeroed_share > MOST_ZEROED and sqnr < CLEAR_DB:
        return f"{100 * zeroed_share:.0f} % of its values that are not 0 have become 0, and its SQNR is {sqnr:.1f} dB"
    return ""


@dataclass(frozen=True)
class Powers:
    """Sums of reference**2, error**2, reference**4 and error**4, from which the ratios are computed."""
    r2: float = 0.0
    e2: float = 0.0
    r4: float = 0.0
    e4: float = 0.0

    def __add__(self, other: Powers) -> Powers:
        return Powers(self.r2 + other.r2, self.e2 + other.e2, self.r4 + other.r4, self.e4 + other.e4)

    @property
    def sqnr_db(self) -> float:
        return decibel(self.r2, self.e2)

    @property
    def peak_snr_db(self) -> float:
        """The ratio in the 4-norm, 20 log10(|r|_4 / |r - v|_4), which the largest elements and errors dominate.

        What is read from an output is its peaks: the class, the boxes, the characters. A detector whose scores are
        clipped (few elements, far off) loses them while its SQNR stays. NanoDet-g, its worst output over 32 pictures:
        percentile 99.999 has 20.5 dB and a box F1 of 57, percentile 99.9999 18.3 dB and 92; in the 4-norm, 16.2 and
        19.5 dB.
        """
        return decibel(self.r4, self.e4) / 2


def powers(reference: Array, value: Array) -> Powers:
    """Return the sums for one pair of arrays, without elements that are infinite in the reference (masked scores)."""
    r, v = _comparable(reference, value)
    r2, e2 = r ** 2, (r - v) ** 2
    return Powers(float(r2.sum()), float(e2.sum()), float((r2 ** 2).sum()), float((e2 ** 2).sum()))


def typical(items: Sequence[Powers]) -> Powers | None:
    """Return the powers of the mean item, normalised to signal 1, or None if no item has a signal.

    An item's errors are taken relative to its own signal, or to the median item's where that is stronger: neither one
    loud item decides, nor the noise in one that has next to nothing to say (a picture without objects).
    """
    table = np.array([[item.r2, item.e2, item.r4, item.e4] for item in items])
    signals, errors = table[:, 0::2], table[:, 1::2]
    if not signals.any():
        return None
    floor = np.median(signals, axis=0)
    floor = np.where(floor > 0.0, floor, signals.mean(axis=0))
    e2, e4 = (errors / np.maximum(signals, floor)).mean(axis=0)
    return Powers(1.0, float(e2), 1.0, float(e4))


def _comparable(reference: Array, value: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the flat elements of both arrays where the reference is finite."""
    known = np.isfinite(reference)
    return np.asarray(reference[known], np.float64), np.asarray(value[known], np.float64)


def decibel(signal: float, noise: float) -> float:
    if noise == 0.0:
        return math.inf
    if signal == 0.0 or not math.isfinite(noise):       # a quantised run that gave NaN is as bad as can be
        return -math.inf
    return 10.0 * math.log10(signal / noise)
