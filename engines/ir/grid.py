"""Weights that were quantised before: the int8 numbers and scales that they were made of, found in the floats.

    w = s[o] * k,   k whole numbers from -128 to 127        for each output channel o, or one s for all

Dequantised weights are constants like others to every pass: they are turned, joined, and scaled channel by channel,
and all of that leaves them on such a grid. So nothing has to remember where they came from.
"""
from __future__ import annotations

import numpy as np

from engines.ir.graph import Array, QParams

STEPS = (127, 128, *range(126, 0, -1))      # what the greatest weight of a channel may be, the usual ones first
SAMPLE = 32             # weights of a channel on which a number of steps is tried first
OFF = 2.0 ** -12        # of a step: what scaling once more may have rounded away


def grid_params(weight: Array, axis: int) -> QParams | None:
    """int8, symmetric, a scale for each index of `axis`, which lose nothing of the weights; None if there are none."""
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype(np.float32, copy=False)
    scales = np.broadcast_to(_scales(rows.reshape(1, -1)), len(rows))       # of one for all they are known best
    if not scales.all():
        scales = _scales(rows)
    if not scales.all():
        return None
    return QParams(tuple(map(float, scales)), (0,) * len(rows), "int8", axis)


def _scales(rows: Array) -> Array:
    """float32 [rows]: the scale of each; 0 where it has none, 1 where it is all zeros."""
    largest = np.abs(rows).max(axis=1)
    scales = np.where(largest > 0, 0, 1).astype(np.float32)
    sample = rows[:, np.linspace(0, rows.shape[1] - 1, min(SAMPLE, rows.shape[1])).astype(int)]
    for steps in STEPS:
        open_ = np.flatnonzero(scales == 0)
        if not open_.size:
            break
        step = largest[open_] / np.float32(steps)
        fits = _fits(sample[open_], step)
        open_, step = open_[fits], step[fits]
        if open_.size:
            fits = _fits(rows[open_], step)
            scales[open_[fits]] = _refined(rows[open_[fits]], step[fits])
    return scales


def _fits(rows: Array, step: Array) -> Array:
    """Whether each row is whole numbers of its step that int8 holds."""
    numbers = rows / step[:, None]
    whole = np.rint(numbers)
    return np.asarray(((np.abs(numbers - whole) < OFF) & (whole >= -128) & (whole <= 127)).all(axis=1))


def _refined(rows: Array, step: Array) -> Array:
    """The step, or one of its neighbours among floats, that gives most of the weights bit for bit."""
    whole = np.rint(rows / step[:, None])
    near = [step, np.nextafter(step, np.float32(np.inf)), np.nextafter(step, np.float32(0))]
    exact = [(whole * other[:, None] == rows).sum(axis=1) for other in near]
    return np.asarray(np.stack(near)[np.argmax(exact, axis=0), np.arange(len(step))])
