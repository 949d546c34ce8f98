"""Mean of each input channel over the calibration data, for bias correction.

See infer_server.engines.passes.quantization.bias_correction for the equation.
"""
from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from infer_server.calibration.histogram import Floats
from infer_server.engines.ir.graph import Array


class ChannelMeans:
    """Collector of the mean at each index of a tensor's last axis, over all observed values."""

    def __init__(self, tensors: Iterable[str]) -> None:
        self._sums: dict[str, Floats] = {}
        self._counts = dict.fromkeys(tensors, 0)

    def observe(self, tensor: str, values: Array) -> None:
        """Add values [..., C] of a tensor; a tensor whose C varies with open extents is dropped."""
        if tensor not in self._counts:
            return
        rows = values.reshape(-1, values.shape[-1])
        if np.ndim(self._sums.get(tensor, 0.0)) and len(self._sums[tensor]) != rows.shape[1]:
            del self._sums[tensor], self._counts[tensor]
            return
        # sum(axis=0) takes up to twice as long as einsum for few channels.
        self._sums[tensor] = self._sums.get(tensor, 0.0) + np.einsum("ij->j", rows, dtype=np.float64)
        self._counts[tensor] += len(rows)

    def result(self) -> dict[str, Floats]:
        """Return the means by tensor, float64 [C]."""
        return {tensor: total / self._counts[tensor] for tensor, total in self._sums.items()}
