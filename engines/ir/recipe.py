"""Results of calibration by tensor, sufficient to quantise a graph of the model for any shapes; pixels of inputs."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pixels:
    """Normalisation pixel * scale + shift per channel, which yields the model's input."""
    scale: tuple[float, ...]
    shift: tuple[float, ...]


@dataclass(frozen=True)
class Recipe:
    """Calibration results.

    Attributes
    ----------
    ranges : mapping from str to (float, float)
        (low, high) of real values, after smoothing.
    means : mapping from str to tuple of float
        Mean per index of the last axis, for bias correction; empty without it.
    smoothing : mapping from str to tuple of float
        Divisor per index of the last axis.
    """
    ranges: Mapping[str, tuple[float, float]]
    means: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    smoothing: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
