"""What calibration found of a model, by tensor: enough to quantise a graph of it, whatever shapes the graph is for."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recipe:
    """ranges: (low, high) of real values. means: of each index of the last axis, by which biases are corrected; empty
    where they are not. smoothing: what each index of the last axis is divided by; the ranges are those after it."""
    ranges: Mapping[str, tuple[float, float]]
    means: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    smoothing: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
