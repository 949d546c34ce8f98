"""The means by which biases are corrected: of each input channel, over the calibration data.

engines.passes.quantization.bias_correction has the equation.
"""
from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from calibration.histogram import Floats
from engines.ir.graph import Array


class ChannelMeans:
    """The mean of each index of a tensor's last axis, over all values observed."""

    def __init__(self, tensors: Iterable[str]) -> None:
        self._sums: dict[str, Floats] = {}
        self._counts = dict.fromkeys(tensors, 0)

    def observe(self, tensor: str, values: Array) -> None:
        """values: [..., C]. A tensor whose C follows from open extents has no such mean, and is dropped."""
        if tensor not in self._counts:
            return
        rows = values.reshape(-1, values.shape[-1])
        if np.ndim(self._sums.get(tensor, 0.0)) and len(self._sums[tensor]) != rows.shape[1]:
            del self._sums[tensor], self._counts[tensor]
            return
        # einsum: sum(axis=0) takes up to twice as long where there are few channels.
        self._sums[tensor] = self._sums.get(tensor, 0.0) + np.einsum("ij->j", rows, dtype=np.float64)
        self._counts[tensor] += len(rows)

    def result(self) -> dict[str, Floats]:
        """{tensor: float64 [C]}"""
        return {tensor: total / self._counts[tensor] for tensor, total in self._sums.items()}
