"""Affine normalisation of pixels."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pixels:
    """Normalisation pixel * scale + shift per channel, which yields the model's input."""
    scale: tuple[float, ...]
    shift: tuple[float, ...]
