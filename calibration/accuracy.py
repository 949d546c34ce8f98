"""How far a quantised model is from the float one: three measures, and a meter that sums them over streamed runs."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from engines.ir import Array


def sqnr_db(reference: Array, value: Array) -> float:
    """Signal to quantisation noise ratio in dB, 10 log10(sum r^2 / sum (r - v)^2); inf if equal, arrays of one shape.

    6 dB are a bit; a layer's output in 8 bits has about 40 dB, a usable network output 15 to 30.
    """
    return _decibel(*_signal_and_noise(reference, value))


def cosine(reference: Array, value: Array) -> float:
    """Cosine of the angle between the arrays as flat vectors; 1 if both are zero."""
    a, b = np.ravel(reference).astype(np.float64), np.ravel(value).astype(np.float64)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else float(np.array_equal(a, b))


def top1_agreement(reference: Array, value: Array) -> float:
    """The share (0..1) of rows, along the last axis, whose largest element is at the same place in both."""
    return float(np.mean(np.argmax(reference, axis=-1) == np.argmax(value, axis=-1)))


class SqnrMeter:
    """SQNR of each tensor over many runs, energies summed: memory of two numbers a tensor."""

    def __init__(self) -> None:
        self._energies: dict[str, tuple[float, float]] = {}

    def add(self, reference: Mapping[str, Array], value: Mapping[str, Array]) -> None:
        """Count one run; tensors that only one of the two has are left out."""
        for tensor in reference.keys() & value.keys():
            signal, noise = self._energies.get(tensor, (0.0, 0.0))
            more_signal, more_noise = _signal_and_noise(reference[tensor], value[tensor])
            self._energies[tensor] = signal + more_signal, noise + more_noise

    def result(self) -> dict[str, float]:
        """{tensor: dB}, worst first."""
        values = {tensor: _decibel(*energies) for tensor, energies in self._energies.items()}
        return dict(sorted(values.items(), key=lambda item: (item[1], item[0])))


def layer_report(sqnr: Mapping[str, float], limit: int = 10) -> str:
    """The `limit` worst tensors as a table for people."""
    worst = sorted(sqnr.items(), key=lambda item: item[1])[:limit]
    width = max((len(tensor) for tensor, _ in worst), default=0)
    return "\n".join([f"{'tensor':{width}}  SQNR dB", *(f"{tensor:{width}}  {db:7.1f}" for tensor, db in worst)])


def mean_db(values: Iterable[float], cap: float = 100.0) -> float:
    """The mean of ratios in dB, each at most `cap`, so that one exact item doesn't hide the others."""
    return float(np.mean([min(value, cap) for value in values]))


def _signal_and_noise(reference: Array, value: Array) -> tuple[float, float]:
    r, v = np.asarray(reference, np.float64), np.asarray(value, np.float64)
    assert r.shape == v.shape, f"shapes differ: {r.shape} and {v.shape}"
    return float(np.vdot(r, r)), float(np.vdot(r - v, r - v))


def _decibel(signal: float, noise: float) -> float:
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal else -math.inf
