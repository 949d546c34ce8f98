"""Results of calibration by tensor, sufficient to quantise a graph of the model for any shapes; pixels of inputs."""
from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from infer_server.engines.ir.graph import Array


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
    rounding : mapping from str to str
        By output of a contraction: steps that each int8 weight lies above the nearest one; see `packed_steps`.
    scaled_rows : tuple of str
        Tensors that products read with a scale for each row, computed at run time.
    """
    ranges: Mapping[str, tuple[float, float]]
    means: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    smoothing: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    rounding: Mapping[str, str] = field(default_factory=dict)
    scaled_rows: tuple[str, ...] = ()


def packed_steps(steps: Array) -> str:
    """Return an int8 array as text: its bytes, compressed by zlib, in base64."""
    return base64.b64encode(zlib.compress(steps.tobytes())).decode()


def unpacked_steps(text: str, shape: tuple[int, ...]) -> Array | None:
    """Return the array of `packed_steps`; None if it has another number of elements, or is damaged."""
    size = int(np.prod(shape))
    try:
        content = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except (ValueError, zlib.error):
        return None
    return np.frombuffer(content, np.int8).reshape(shape) if len(content) == size else None
