"""Factors by which the channels of tensors are scaled (engines/passes/quantization/smoothing.py).

SmoothQuant, for products: outliers of activations move to weights.

    s[k] = max |x[k]| ** alpha / max |W[k]| ** (1 - alpha)      k: x's channel, W's row

The best alpha depends on the model. MiniLM-L6, four sentences, ranges by min-max, SQNR of the valid tokens, the padding
and the embeddings: 16.3, 16.5, 17.4 dB without smoothing; 16.8, 16.9, 18.4 with alpha 0.5; 21.1, 20.5, 22.7 with 0.6;
22.2, 13.2, 23.0 with 0.7; 22.5, 6.3, 23.7 with 0.8.

Equalisation, for convolutions: each channel gets as many steps as its weights leave to it. Weights count relative to
the largest of their output, whose scale they share: those of a depthwise layer count as 1 each.

    s[k] = max |x[k]| ** alpha / share[k] ** (1 - alpha)        share[k] = max over o of max |W[o, k]| / max |W[o]|

If all shares are 1, weights set no limit, and alpha is raised halfway to 1; with 1 itself, unseen items would exceed
the range in every channel. MobileNetV2, 40 photos, SQNR on 24 others: 19.2 dB without equalisation, 21.7 dB with 0.5
for all tensors, 22.0 dB with 0.6, 22.4 dB with 0.5 and with 0.75 before depthwise layers.

No channel gets a wider range than the whole tensor had. Therefore saturation is the upper bound of a scaled ReLU6.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (ICML 2023).
Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (ICCV 2019).
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from infer_server.calibration.histogram import Floats, Range
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.passes.quantization.smoothing import weight_shares, weights_behind

SMALLEST = 1e-3     # minimum peak of a channel relative to the largest
ALPHAS = (0.6, 0.8)     # candidates of alpha of SmoothQuant
EQUALISING = (0.5, 0.65)     # candidates of alpha of equalisation
LEAST_PEAK = 1e-2       # minimum peak of a channel relative to the largest, for equalisation


class ChannelPeaks:
    """Collector of the extremes at each index of a tensor's last axis, over all observed values and 0."""

    def __init__(self, tensors: Iterable[str]) -> None:
        self._lows: dict[str, Floats] = dict.fromkeys(tensors, np.zeros(1))
        self._highs: dict[str, Floats] = dict.fromkeys(tensors, np.zeros(1))

    def observe(self, tensor: str, values: Array) -> None:
        """Update the extremes of a tensor with values of shape [..., C]."""
        if tensor in self._lows and values.size:
            rows = values.reshape(-1, values.shape[-1])
            self._lows[tensor] = np.minimum(self._lows[tensor], rows.min(axis=0))
            self._highs[tensor] = np.maximum(self._highs[tensor], rows.max(axis=0))

    def result(self) -> dict[str, Floats]:
        """Return the largest |x| by tensor, float64 [C]."""
        return {tensor: np.maximum(-low, self._highs[tensor]) for tensor, low in self._lows.items()}

    def ranges(self, factors: Mapping[str, Sequence[float]]) -> dict[str, Range]:
        """Return the extremes of each tensor of `factors`, divided by its factors, one per channel."""
        return {tensor: (float(np.min(self._lows[tensor] / s)), float(np.max(self._highs[tensor] / s)))
                for tensor, s in factors.items()}


def smoothing_factors(graph: Graph, peaks: Mapping[str, Array], alpha: float) -> dict[str, Floats]:
    """Return the factors s, float64 [C], of each tensor with known peaks. alpha: 0 to 1."""
    factors = {}
    for tensor, peak in peaks.items():
        rows = np.max([np.abs(weight).max(axis=1) for weight in weights_behind(graph, tensor)], axis=0)
        x, w = (np.maximum(part, SMALLEST * part.max()) for part in (np.asarray(peak, np.float64), rows))
        if x.max() > 0 and w.max() > 0:
            factors[tensor] = x ** alpha / w ** (1 - alpha)
    return factors


def equalising_factors(graph: Graph, peaks: Mapping[str, Array], alpha: float) -> dict[str, Floats]:
    """Return the factors s, float64 [C], of each tensor with known peaks that a convolution reads. alpha: 0 to 1."""
    factors, shares = {}, weight_shares(graph)
    for tensor, peak in peaks.items():
        x = np.maximum(np.asarray(peak, np.float64), LEAST_PEAK * peak.max())
        if x.max() > 0:
            share = np.maximum(shares[tensor], SMALLEST)
            s = x ** ((1 + alpha) / 2 if share.min() == 1 else alpha) / share ** (1 - alpha)
            factors[tensor] = np.minimum(s, x.max() / (x / s).max())
    return factors
