"""Rounding of weights in groups by the error of the layer's output (GPTQ), with calibration data.

    minimise  trace((W' - W) H (W' - W)^T)      H = E[x x^T]

Groups are rounded from first to last; the weights of the groups behind take back the error of a group as far as their
inputs are correlated (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023). Within a group, calibration/rounding.py rounds by what the groups behind cannot take back,
the Schur complement of their part of H. A layer whose rounding to the nearest has the lower error keeps that.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from infer_server.calibration.histogram import Floats
from infer_server.calibration.rounding import DAMPING, rounded
from infer_server.engines.compiler.weight_only.quantise import NEAREST, to_nearest
from infer_server.engines.frontend.weight_only.groups import LIMITS, GroupedWeights, best_scales, nearest
from infer_server.engines.frontend.weight_only.layers import Layer
from infer_server.engines.ir.graph import Array

GPTQ = "GPTQ"
PART = 1 << 22          # weights that are rounded at once


class GptqRounder:
    """Rounder by the second moments of what each layer reads."""

    def __init__(self, moments: Callable[[str], Floats | None]) -> None:
        """Take a function that returns H, float64 [K, K], of a tensor, or None if it is unknown."""
        self._moments = moments

    def __call__(self, layer: Layer, rows: Array, bits: int, group: int) -> tuple[GroupedWeights, str, float | None]:
        hessian = self._moments(layer.data)
        if hessian is None:
            return to_nearest(layer, rows, bits, group)
        found = {GPTQ: by_output_error(rows, hessian, bits, group),
                 NEAREST: nearest(rows, bits, group, np.diagonal(hessian))}
        errors = {method: _energy(rows - groups.real(), hessian) for method, groups in found.items()}
        method = min(found, key=lambda one: errors[one])
        signal, noise = _energy(rows, hessian), errors[method]
        return found[method], method, 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def by_output_error(rows: Array, hessian: Floats, bits: int, group: int) -> GroupedWeights:
    """Round weights [N, K] in groups by the error of the layer's output.

    Parameters
    ----------
    rows : float32 ndarray of shape (N, K)
    hessian : float64 ndarray of shape (K, K)
    bits : {4, 8}
    group : int
        Number of weights of a group.
    """
    depth = rows.shape[1]
    damped = hessian.copy()
    mean = np.trace(hessian) / depth
    damped[range(depth), range(depth)] += DAMPING * mean if mean > 0 else 1
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T        # upper: factor^T factor is the inverse
    count = max(PART // depth, 1)
    parts = [_by_groups(rows[first:first + count], factor, bits, group) for first in range(0, len(rows), count)]
    return GroupedWeights(np.concatenate([numbers for numbers, _ in parts]),
                          np.concatenate([scales for _, scales in parts]), group, bits)


def _by_groups(rows: Array, factor: Floats, bits: int, group: int) -> tuple[Array, Array]:
    low, high = LIMITS[bits]
    left, depth = rows.astype(np.float64), rows.shape[1]
    numbers, scales = np.empty(rows.shape, np.int8), np.empty((len(rows), -(-depth // group)), np.float32)
    for index, first in enumerate(range(0, depth, group)):
        here, behind = slice(first, first + group), slice(first + group, depth)
        own = factor[here, here]
        rest: Floats = np.asarray(np.linalg.inv(own.T @ own), np.float64)       # what those behind cannot take back
        one = left[:, here]
        scale = best_scales(one[:, None].astype(np.float32), bits, np.diagonal(rest)[None].astype(np.float32))
        scales[:, index] = scale[:, 0]
        steps = np.divide(one, scale, out=np.zeros_like(one), where=scale != 0)
        chosen = np.clip(rounded(np.clip(steps, low, high)[None], rest[None])[0], low, high)
        numbers[:, here] = chosen
        if behind.start < depth:
            left[:, behind] -= np.linalg.solve(own.T, (one - chosen * scale).T).T @ factor[here, behind]
    return numbers, scales


def _energy(rows: Array, hessian: Floats) -> float:
    """Return trace(rows H rows^T)."""
    return float(sum(np.vdot(part @ hessian.astype(np.float32), part)
                     for part in np.array_split(rows, max(rows.size // PART, 1))))
