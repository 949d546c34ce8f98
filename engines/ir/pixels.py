"""How pixels become what a model takes."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pixels:
    """What the model takes is pixel * scale + shift, channel by channel."""
    scale: tuple[float, ...]
    shift: tuple[float, ...]
