"""Weights that were quantised before: the int8 numbers and scales that they were made of, found in the floats.

    w = s[o] * k,   k whole numbers from -128 to 127        for each output channel o, or one s for all
    w = s[o] * (k + r[o])                                   of uint8, whose zero point is not in the middle

Those of four bits have their scales by blocks of a channel: w = s[o, b] * k[o, i], b = i // block.

Dequantised weights are constants like others to every pass: they are turned, joined, and scaled channel by channel,
and all of that leaves them on such a grid. So nothing has to remember where they came from.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engines.ir.content import remembering
from engines.ir.graph import Array, QParams

STEPS = (127, 128, *range(126, 0, -1))      # what the greatest weight of a channel may be, the usual ones first
STEPS_OFF_MIDDLE = (*STEPS, *range(129, 256))           # the same of uint8 less any zero point
STEPS_OF_BLOCKS = (8, 7, *range(15, 8, -1), *range(6, 0, -1))       # the same of four bits, less a zero point
BLOCKS = (256, 128, 64, 32, 16)
SAMPLE = 32             # weights of a channel on which a number of steps is tried first
OFF = 2.0 ** -12        # of a step: what scaling once more may have rounded away


@remembering()
def grid_params(weight: Array, axis: int) -> QParams | None:
    """int8, symmetric, a scale for each index of `axis`, which lose nothing of the weights; None if there are none."""
    if not weight.size:
        return None
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype(np.float32, copy=False)
    scales = np.broadcast_to(_scales(rows.reshape(1, -1)), len(rows))       # of one for all they are known best
    if not scales.all():
        scales = _scales(rows)
    if not scales.all():
        return None
    return QParams(tuple(map(float, scales)), (0,) * len(rows), "int8", axis)


@remembering()
def offset_grid(weight: Array, axis: int) -> tuple[Array, Array] | None:
    """A scale and a whole number r for each index of `axis`, with weights / scale - r in int8; None if none have.
    One r for all, if all have one scale and fit in 8 bits together."""
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype(np.float32, copy=False)
    whole = rows.reshape(1, -1)
    if not (scales := _scales(whole, STEPS_OFF_MIDDLE, _inside_eight_bits)).all():
        whole = rows
        if not (scales := _scales(whole, STEPS_OFF_MIDDLE, _inside_eight_bits)).all():
            return None
    numbers = np.rint(whole / scales[:, None])
    rest = np.maximum(numbers.max(axis=1) - 127, 0) + np.minimum(numbers.min(axis=1) + 128, 0)
    return np.broadcast_to(scales, len(rows)), np.broadcast_to(rest, len(rows))


@dataclass(frozen=True)
class Blocks:
    """Weights [rows, columns] as scale * (numbers - zeros), a scale and a zero for each block of a row."""
    block: int
    numbers: Array              # uint8, 0 to 15
    scales: Array               # float32 [rows, blocks]
    zeros: Array                # uint8, likewise


def block_params(rows: Array) -> Blocks | None:
    """Four bits that lose nothing of the weights [rows, columns]; None if no blocks of usual sizes have them."""
    if not rows.size or not _few_levels(rows[0, :min(BLOCKS)]):
        return None
    for block in (rows.shape[1], *BLOCKS):
        if block <= rows.shape[1] and _in_blocks(rows[:1], block) and (found := _in_blocks(rows, block)):
            return found
    return None


def _few_levels(weights: Array) -> bool:
    """Whether weights of one block may be of four bits: of them and 0 no two that differ do so by less than a fifteenth
    of what all span. Of weights that were never quantised this is false, and soon told."""
    steps = np.diff(np.sort(np.append(weights.astype(np.float32), np.float32(0))))
    span = steps.sum()
    return not (steps[steps > 4 * OFF * span] < span / 16).any()


def _in_blocks(rows: Array, block: int) -> Blocks | None:
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % block))).reshape(-1, block)
    scales = _scales(padded, STEPS_OF_BLOCKS, _inside_four_bits)
    if not scales.all():
        return None
    whole = np.rint(padded / scales[:, None]).astype(np.int8)
    low, high = whole.min(axis=1), whole.max(axis=1)
    zeros = np.where((low >= -8) & (high <= 7), 8, np.maximum(-low, 0)).astype(np.uint8)
    numbers = whole + zeros[:, None]
    return Blocks(block, numbers.astype(np.uint8).reshape(len(rows), -1)[:, :rows.shape[1]],
                  scales.reshape(len(rows), -1), zeros.reshape(len(rows), -1))


def _scales(rows: Array, usual: Sequence[int] = STEPS, inside: Callable[[Array], Array] | None = None) -> Array:
    """float32 [rows]: the scale of each; 0 where it has none, 1 where it is all zeros. usual: what the greatest weight
    may be; inside: which rows of whole numbers can be stored, as int8 if that is not said."""
    largest = np.abs(rows).max(axis=1)
    scales = np.where(largest == 0, 1, 0).astype(np.float32)        # NaN has none
    sample = rows[:, np.linspace(0, rows.shape[1] - 1, min(SAMPLE, rows.shape[1])).astype(int)]
    inside = inside or _inside_int8
    if not _has_steps(sample, largest, usual, inside):      # weights that were never quantised: nearly all there are
        return scales
    for steps in usual:
        open_ = np.flatnonzero(scales == 0)
        if not open_.size:
            break
        step = largest[open_] / np.float32(steps)
        fits = _fits(sample[open_], step, inside)
        open_, step = open_[fits], step[fits]
        if open_.size:
            fits = _fits(rows[open_], step, inside)
            scales[open_[fits]] = _refined(rows[open_[fits]], step[fits])
    return scales


def _has_steps(sample: Array, largest: Array, usual: Sequence[int], inside: Callable[[Array], Array]) -> bool:
    """Whether the first row that is not all zeros is, in the sample, whole numbers of any number of steps."""
    first = int(np.argmax(largest > 0))
    every = np.broadcast_to(sample[first], (len(usual), sample.shape[1]))
    return not largest[first] or bool(_fits(every, largest[first] / np.array(usual, np.float32), inside).any())


def _fits(rows: Array, step: Array, inside: Callable[[Array], Array]) -> Array:
    """Whether each row is whole numbers of its step that are inside what they are stored as."""
    numbers = rows / step[:, None]
    whole = np.rint(numbers)
    return np.asarray(inside(whole) & (np.abs(numbers - whole) < OFF).all(axis=1))


def _inside_int8(whole: Array) -> Array:
    return np.asarray(((whole >= -128) & (whole <= 127)).all(axis=1))


def _inside_four_bits(whole: Array) -> Array:
    """With the zero point that each row likes best."""
    return _span(whole) <= 15


def _inside_eight_bits(whole: Array) -> Array:
    """Likewise."""
    return _span(whole) <= 255


def _span(whole: Array) -> Array:
    return np.asarray(np.maximum(whole.max(axis=1), 0) - np.minimum(whole.min(axis=1), 0))


def _refined(rows: Array, step: Array) -> Array:
    """The step, or one of its neighbours among floats, that gives most of the weights bit for bit."""
    whole = np.rint(rows / step[:, None])
    near = [step, np.nextafter(step, np.float32(np.inf)), np.nextafter(step, np.float32(0))]
    exact = [(whole * other[:, None] == rows).sum(axis=1) for other in near]
    return np.asarray(np.stack(near)[np.argmax(exact, axis=0), np.arange(len(step))])
