"""Integers between the pixels of a Resize, rounded as ONNX Runtime rounds them.

Without antialias the blend of the two pixels along each axis is truncated. With antialias every axis is rounded by
itself, the last one first. Bytes are blended in fixed point.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import product

import numpy as np

from infer_server.engines.ir.graph import Array

BLEND_BITS, FILTER_BITS = 10, 22        # fraction bits of weights for bytes: of channels-last blends, and of filters
_IMAGE_AXES = {2: (0, 1), 3: (0, 1, 2), 4: (2, 3), 5: (2, 3, 4)}      # axes that ONNX Runtime interpolates, by rank


def blend_axes(rank: int, changed: Sequence[int]) -> tuple[int, ...]:
    """Return the axes to blend along: those of the image that `changed` lie in."""
    images = (1, 2) if rank == 4 and 1 in changed else _IMAGE_AXES.get(rank, ())
    return images if set(changed) <= set(images) else tuple(changed)


def blended(x: Array, positions: Mapping[int, Array]) -> Array:
    """Return `x` blended linearly at the positions `positions` along each axis, truncated to its type."""
    fixed_point = x.dtype.itemsize == 1 and tuple(positions) == (1, 2) and x.ndim == 4
    ends = [_ends(position, x.shape[axis], fixed_point) for axis, position in positions.items()]
    total = np.zeros((), np.int32 if fixed_point else np.float32)
    for corner in product(*ends):
        pixels = x
        for axis, (index, _) in zip(positions, corner, strict=True):
            pixels = np.take(pixels, index, axis)
        weights = [weight.reshape(-1, *[1] * (x.ndim - axis - 1))
                   for axis, (_, weight) in zip(positions, corner, strict=True)]
        total = total + reduce(np.multiply, reversed(weights)) * pixels.astype(total.dtype)
    return np.asarray(np.trunc(total / (1 << 2 * BLEND_BITS)) if fixed_point else total).astype(x.dtype)


def _ends(position: Array, size: int, fixed_point: bool) -> list[tuple[Array, Array]]:
    """Return (index, weight) of the pixels below and above each position; at the last pixel both count half."""
    position = np.clip(position, 0, size - 1).astype(np.float32)
    below = position.astype(np.int64)
    above = np.minimum(below + 1, size - 1)
    one = 1 << BLEND_BITS if fixed_point else 1
    at = (position * np.float32(one)).astype(np.int32) if fixed_point else position
    weights = [np.where(below == above, one / 2, np.abs(at - end * one)).astype(np.int32 if fixed_point else np.float32)
               for end in (above, below)]
    return [(below, weights[0]), (above, weights[1])]


def filtered(x: Array, axis: int, weights: Array) -> Array:
    """Return `x` multiplied by `weights` [out, in] along `axis` and rounded; halves go away from zero."""
    if x.dtype.itemsize == 1:
        fixed_point = _rounded(weights * np.float32(1 << FILTER_BITS)).astype(np.int64)
        made = (_along(x.astype(np.int64), axis, fixed_point) + (1 << FILTER_BITS - 1)) >> FILTER_BITS
    else:
        made = _rounded(_along(x.astype(np.float32), axis, weights))
    limits = np.iinfo(x.dtype)
    return np.asarray(np.clip(made, limits.min, limits.max), x.dtype)


def _along(x: Array, axis: int, weights: Array) -> Array:
    """Return the sum of x * weights along `axis`, pixel after pixel."""
    lines = np.moveaxis(x, axis, -1)
    total = np.zeros((*lines.shape[:-1], len(weights)), x.dtype)
    for pixel in range(lines.shape[-1]):
        total += lines[..., pixel, None] * weights[:, pixel]
    return np.asarray(np.moveaxis(total, -1, axis))


def _rounded(x: Array) -> Array:
    return np.asarray(np.copysign(np.floor(np.abs(x) + 0.5), x))
