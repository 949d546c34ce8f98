"""SmoothQuant factors, which move outliers of activations to weights (engines/passes/quantization/smoothing.py).

    s[k] = max |x[k]| ** alpha / max |W[k]| ** (1 - alpha)      k: x's channel, W's row

The best alpha depends on the model. MiniLM-L6, four sentences, ranges by min-max, SQNR of the valid tokens, the padding
and the embeddings: 16.3, 16.5, 17.4 dB without smoothing; 16.8, 16.9, 18.4 with alpha 0.5; 21.1, 20.5, 22.7 with 0.6;
22.2, 13.2, 23.0 with 0.7; 22.5, 6.3, 23.7 with 0.8.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (ICML 2023).
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from infer_server.calibration.histogram import Floats
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.passes.quantization.smoothing import weights_behind

SMALLEST = 1e-3     # minimum peak of a channel relative to the largest
ALPHAS = (0.6, 0.8)     # candidates of alpha


class ChannelPeaks:
    """Collector of the largest |x| at each index of a tensor's last axis, over all observed values."""

    def __init__(self, tensors: Iterable[str]) -> None:
        self._peaks: dict[str, Floats] = dict.fromkeys(tensors, np.zeros(1))

    def observe(self, tensor: str, values: Array) -> None:
        """Update the peaks of a tensor with values of shape [..., C]."""
        if tensor in self._peaks and values.size:
            rows = values.reshape(-1, values.shape[-1])
            self._peaks[tensor] = np.max([self._peaks[tensor] + np.zeros(rows.shape[1]), rows.max(axis=0),
                                          -rows.min(axis=0)], axis=0)

    def result(self) -> dict[str, Floats]:
        """Return the peaks by tensor, float64 [C]."""
        return dict(self._peaks)


def smoothing_factors(graph: Graph, peaks: Mapping[str, Array], alpha: float) -> dict[str, Floats]:
    """Return the factors s, float64 [C], of each tensor with known peaks. alpha: 0 to 1."""
    factors = {}
    for tensor, peak in peaks.items():
        rows = np.max([np.abs(weight).max(axis=1) for weight in weights_behind(graph, tensor)], axis=0)
        x, w = (np.maximum(part, SMALLEST * part.max()) for part in (np.asarray(peak, np.float64), rows))
        if x.max() > 0 and w.max() > 0:
            factors[tensor] = x ** alpha / w ** (1 - alpha)
    return factors
