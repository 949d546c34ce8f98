"""Errors of a tensor over several items, summed item by item, so that no item is kept."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.calibration.accuracy.measures import decibel
from infer_server.engines.ir.graph import Array


@dataclass(frozen=True)
class TensorErrors:
    """Errors of an output or of a layer's result against the reference, over all items.

    Attributes
    ----------
    name : str
        Name of the tensor.
    sqnr_db : float
        Signal to quantisation noise ratio in dB; inf if all elements are equal, -inf if an element is NaN or infinite
        where the reference is finite.
    largest : float
        Largest absolute error.
    relative : float
        Largest error as a share of the reference's range, its maximum - minimum.
    cosine : float
        Cosine of the angle between the two, all items as one vector.
    wrong : str
        Why the tensor cannot be compared: another shape; "" if it can.
    """
    name: str
    sqnr_db: float = math.inf
    largest: float = 0.0
    relative: float = 0.0
    cosine: float = 1.0
    wrong: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the errors for a JSON file: infinite numbers, which JSON lacks, are None."""
        return {"name": self.name, "equal": self.sqnr_db == math.inf and not self.wrong,
                **{key: value if math.isfinite(value) else None for key, value in (
                    ("sqnr_db", self.sqnr_db), ("largest_error", self.largest), ("relative_error", self.relative),
                    ("cosine", self.cosine))}, **({"wrong": self.wrong} if self.wrong else {})}


class ErrorSums:
    """Running sums of a tensor's errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._signal = self._noise = self._power = self._product = self._largest = 0.0
        self._low, self._high = math.inf, -math.inf
        self._wrong = ""

    def add(self, value: Any, reference: Any) -> None:
        """Add one item. Elements that are not finite in the reference are left out."""
        if not isinstance(value, np.ndarray) or not isinstance(reference, np.ndarray):
            self._wrong = "it is a sequence, which is not compared"
            return
        if value.shape != reference.shape:
            self._wrong = self._wrong or f"it is {list(value.shape)} in A and {list(reference.shape)} in B"
            return
        if "O" in (value.dtype.kind, reference.dtype.kind):     # strings: equal or not
            value, reference = (value != reference).astype(np.float64), np.zeros(value.shape)
        wide = reference.astype(np.float64)
        known = np.isfinite(wide)
        r, v = wide[known], value.astype(np.float64)[known]
        if not r.size:
            return
        error = np.abs(v - r)
        error[np.isnan(error)] = math.inf
        v = np.where(np.isfinite(v), v, 0.0)
        self._signal += float(r @ r)
        self._noise += float(error @ error)
        self._power += float(v @ v)
        self._product += float(r @ v)
        self._largest = max(self._largest, float(error.max()))
        self._low, self._high = min(self._low, float(r.min())), max(self._high, float(r.max()))

    def errors(self) -> TensorErrors:
        """Return the errors of all items so far."""
        if self._wrong:
            return TensorErrors(self._name, -math.inf, math.inf, math.inf, 0.0, self._wrong)
        range_ = self._high - self._low
        range_ = range_ if 0.0 < range_ < math.inf else math.sqrt(self._signal) or 1.0
        norms = math.sqrt(self._signal) * math.sqrt(self._power)
        return TensorErrors(self._name, decibel(self._signal, self._noise), self._largest, self._largest / range_,
                            min(self._product / norms, 1.0) if norms else float(self._noise == 0.0))


class Aligned:
    """Alignment of a tensor's layout: a plan may hold images channels last where the ONNX file has them first."""

    def __init__(self) -> None:
        self._moves: dict[str, tuple[int, int]] = {}

    def __call__(self, name: str, value: Array, reference: Array) -> Array | None:
        """Return the value in the layout of the reference; None if its shape fits in none.

        Where more than one layout fits, as with as many channels as rows and columns, the first item decides: the
        layout with the least error is used for all.
        """
        if name not in self._moves:
            fitting = [move for move in ((0, 0), (-1, 1), (1, -1)) if value.ndim > 2 or move == (0, 0)]
            fitting = [move for move in fitting if np.moveaxis(value, *move).shape == reference.shape]
            if not fitting:
                return None
            self._moves[name] = fitting[0] if len(fitting) == 1 else min(
                fitting, key=lambda move: _noise(np.moveaxis(value, *move), reference))
        moved = np.moveaxis(value, *self._moves[name])
        return moved if moved.shape == reference.shape else None


def _noise(value: Array, reference: Array) -> float:
    with np.errstate(invalid="ignore"):     # inf - inf
        error = value.astype(np.float64) - reference
    return float(np.square(error[np.isfinite(error)]).sum())
