"""Rows quantised at run time: x = scale * r, with a scale for each row or block of it and integers r in -127..127.

Blocks have a layout in bytes: a HEAD (the scale as float32, the sum of the integers as int32), then the integers.
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.ir.graph import Array

STEPS = 127             # integer of the largest number of a row or block
UNSIGNED_STEPS = 255    # the same of a row without negative numbers
LEAST_SCALE = float(np.finfo(np.float32).tiny)      # of a row: zeros stay zeros
MIDDLE = 128            # zero point of rows that are stored as uint8
HEAD = 8                # bytes


def row_scales(x: Array, steps: int = STEPS) -> Array:
    """Return the scale of each row of x [..., K], float32 [..., 1]: max |x| / steps.

    The scale of a row with NaN or infinity is NaN or infinity.
    """
    largest = np.abs(x).max(axis=-1, keepdims=True, initial=0).astype(np.float32)
    return np.asarray(np.maximum(largest * np.float32(1 / steps), np.float32(LEAST_SCALE)))


def rounded(x: Array, block: int) -> tuple[Array, Array]:
    """Quantise the last axis in blocks.

    Returns
    -------
    scales : ndarray
        float32 [..., blocks].
    numbers : ndarray
        int8 [..., blocks, block], 0 for NaN and past the end.
    """
    rows = np.pad(x.astype(np.float32), [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % block)])
    rows = rows.reshape(*x.shape[:-1], -1, block)
    rows = np.where(np.isnan(rows), np.float32(0), rows)
    scales = np.abs(rows).max(-1) * np.float32(1 / STEPS)
    inverse = np.where(scales > 0, 1 / scales, 0).astype(np.float32)
    return scales, np.rint(rows * inverse[..., None]).astype(np.int8)


def real_rows(scales: Array, numbers: Array) -> Array:
    """Dequantise blocks, including the padding of the last one."""
    return np.asarray(numbers * scales[..., None], np.float32).reshape(*scales.shape[:-1], -1)


def from_bytes(x: Array, block: int) -> Array:
    """Dequantise rows of bytes."""
    blocks = np.ascontiguousarray(x).reshape(*x.shape[:-1], -1, HEAD + block)
    return real_rows(np.ascontiguousarray(blocks[..., :4]).view(np.float32)[..., 0], blocks[..., HEAD:])
