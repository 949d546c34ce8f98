"""Symmetric integers with a scale per group of consecutive weights of an output channel.

    w[n, k] = scales[n, k // group] * numbers[n, k]         numbers in -8..7 for four bits, -127..127 for eight
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infer_server.engines.ir.graph import Array

LIMITS = {4: (-8, 7), 8: (-127, 127)}
# Scales that are tried, as shares of the least one that clips nothing: a smaller step for most weights is worth
# clipping the largest. Of eight bits the largest weight keeps its value.
SHARES = {4: np.linspace(1.0, 0.55, 16), 8: np.ones(1)}
LEAST_SCALE = 1e-30     # of a group with smaller weights, which are as good as zeros: 1 / scale would overflow
PART = 1 << 20          # weights that are rounded at once, to bound the memory of temporary arrays


@dataclass(frozen=True)
class GroupedWeights:
    """Quantised weights of output channels.

    Attributes
    ----------
    numbers : int8 ndarray of shape (N, K)
    scales : float32 ndarray of shape (N, groups)
        Scale of each group; 0 for a group of zeros.
    group : int
        Number of weights of a group; the last group of a channel may have fewer.
    bits : {4, 8}
    """
    numbers: Array
    scales: Array
    group: int
    bits: int

    def real(self) -> Array:
        """Return the weights, float32 [N, K]."""
        scales = np.repeat(self.scales, self.group, axis=1)[:, :self.numbers.shape[1]]
        return np.asarray(self.numbers * scales, np.float32)


def nearest(rows: Array, bits: int, group: int, importance: Array | None = None) -> GroupedWeights:
    """Round weights to the nearest integers, by the scale of each group with the least squared error.

    Parameters
    ----------
    rows : float32 ndarray of shape (N, K)
        Weights of each output channel.
    bits : {4, 8}
    group : int
        Number of weights of a group.
    importance : float ndarray of shape (K,), optional
        Weight of each column in the squared error, such as the mean square of what it is multiplied by.
    """
    count = max(PART // max(rows.shape[1], 1), 1)
    parts = [_nearest(rows[first:first + count], bits, group, importance) for first in range(0, len(rows), count)]
    return GroupedWeights(np.concatenate([numbers for numbers, _ in parts]),
                          np.concatenate([scales for _, scales in parts]), group, bits)


def _nearest(rows: Array, bits: int, group: int, importance: Array | None) -> tuple[Array, Array]:
    depth = rows.shape[1]
    groups = np.pad(rows, ((0, 0), (0, -depth % group))).reshape(len(rows), -1, group)
    share = np.ones(depth) if importance is None else importance
    share = np.pad(share, (0, -depth % group)).reshape(-1, group).astype(np.float32)
    scales = best_scales(groups, bits, share)
    return rounded_by(groups, scales, bits).reshape(len(rows), -1)[:, :depth], scales


def best_scales(groups: Array, bits: int, importance: Array) -> Array:
    """Return the scale of each group [N, groups, group] with the least squared error, weighted by `importance`."""
    low, high = LIMITS[bits]
    largest = np.maximum(groups.max(-1) / np.float32(high), groups.min(-1) / np.float32(low))
    largest = np.where(largest < LEAST_SCALE, np.float32(0), largest)
    best, least = largest, np.full(largest.shape, np.inf, np.float32)
    for share in SHARES[bits]:
        scales = largest * np.float32(share)
        errors = _errors(groups, scales, bits, importance)
        better = errors < least
        best, least = np.where(better, scales, best), np.where(better, errors, least)
    if bits == max(LIMITS):
        return np.asarray(best, np.float32)
    fitted = _fitted(groups, best, bits, importance)
    return np.asarray(np.where(_errors(groups, fitted, bits, importance) < least, fitted, best), np.float32)


def rounded_by(groups: Array, scales: Array, bits: int) -> Array:
    """Return the nearest integers, int8 [N, groups, group]; zeros where a scale is 0."""
    low, high = LIMITS[bits]
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    return np.asarray(np.clip(np.rint(groups * inverse[..., None]), low, high), np.int8)


def _errors(groups: Array, scales: Array, bits: int, importance: Array) -> Array:
    difference = rounded_by(groups, scales, bits) * scales[..., None] - groups
    return np.asarray(np.einsum("ngk,ngk,gk->ng", difference, difference, importance), np.float32)


def _fitted(groups: Array, scales: Array, bits: int, importance: Array) -> Array:
    """Return the scales of least squared error for the integers that these scales give."""
    numbers = rounded_by(groups, scales, bits).astype(np.float32)
    above = np.einsum("ngk,ngk,gk->ng", groups, numbers, importance)
    below = np.einsum("ngk,ngk,gk->ng", numbers, numbers, importance)
    fitted = np.divide(above, below, out=scales.copy(), where=below > 0)
    return np.asarray(np.where(fitted > 0, fitted, scales), np.float32)
