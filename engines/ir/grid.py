"""Recovery of the integers and scales of weights that were quantised before, from their float values.

    w = s[o] * k,   k integers in -128..127                 for each output channel o, or one s for all
    w = s[o] * (k + r[o])                                   for uint8 with a zero point off the middle

4-bit weights have a scale per block of a channel: w = s[o, b] * k[o, i], b = i // block.

Dequantised weights are ordinary constants to every pass: they may be transposed, joined and scaled per channel, and
remain on such a grid. Passes need not track their origin.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from infer_server.engines.ir.content import remembering
from infer_server.engines.ir.graph import Array, QParams

STEPS = (127, 128, *range(126, 0, -1))      # possible integers of a channel's largest weight, likely ones first
STEPS_OFF_MIDDLE = (*STEPS, *range(129, 256))           # for uint8 minus any zero point
STEPS_OF_BLOCKS = (8, 7, *range(15, 8, -1), *range(6, 0, -1))       # for 4 bits minus a zero point
BLOCKS = (256, 128, 64, 32, 16)
SAMPLE = 32             # weights per channel that are tested first
PART = 1 << 20          # weights that are tested at once
OFF = 2.0 ** -12        # tolerance in steps, for rounding by later scaling


@remembering()
def grid_params(weight: Array, axis: int) -> QParams | None:
    """Return symmetric int8 parameters per index of `axis` that represent the weights exactly, or None."""
    if not weight.size:
        return None
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype(np.float32, copy=False)
    scales = np.broadcast_to(_scales(rows.reshape(1, -1)), len(rows))       # a common scale is the most reliable
    if not scales.all():
        scales = _scales(rows)
    if not scales.all():
        return None
    return QParams(tuple(map(float, scales)), (0,) * len(rows), "int8", axis)


@remembering()
def offset_grid(weight: Array, axis: int) -> tuple[Array, Array] | None:
    """Return a scale and an integer r per index of `axis` with weights / scale - r in int8, or None.

    r is the same for all if they share one scale and fit into 8 bits together.
    """
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
    """Blockwise quantised weights [rows, columns] = scale * (numbers - zeros), per block of a row."""
    block: int
    numbers: Array              # uint8 in 0..15
    scales: Array               # float32 [rows, blocks]
    zeros: Array                # uint8 [rows, blocks]


def block_params(rows: Array) -> Blocks | None:
    """Return 4-bit blocks that represent the weights [rows, columns] exactly, or None. Common block sizes are tried."""
    if not rows.size or not _few_levels(rows[0, :min(BLOCKS)]) or (found := _block_scales(rows)) is None:
        return None
    block, scales = found
    by_row = scales.reshape(len(rows), -1)
    whole = np.concatenate([np.rint(_in_blocks(rows[part], block) / by_row[part].reshape(-1, 1)).astype(np.int8)
                            for part in _parts(rows)])
    low, high = whole.min(axis=1), whole.max(axis=1)
    zeros = np.where((low >= -8) & (high <= 7), 8, np.maximum(-low, 0)).astype(np.uint8)
    numbers = whole + zeros[:, None]
    return Blocks(block, numbers.astype(np.uint8).reshape(len(rows), -1)[:, :rows.shape[1]],
                  scales.reshape(len(rows), -1), zeros.reshape(len(rows), -1))


@remembering()
def _block_scales(rows: Array) -> tuple[int, Array] | None:
    """Return the size of a block and the scale of each block, or None."""
    for block in (rows.shape[1], *BLOCKS):
        found: list[Array] = []
        for part in (slice(1), *_parts(rows)) if block <= rows.shape[1] else ():    # most fail at the first row
            found.append(_scales(_in_blocks(rows[part], block), STEPS_OF_BLOCKS, _inside_four_bits))
            if not found[-1].all():
                break
        else:
            if found:
                return block, np.concatenate(found[1:])
    return None


def _few_levels(weights: Array) -> bool:
    """Return False if the weights of a block cannot be 4-bit integers times a scale.

    With 0 added, distinct weights must differ by at least about a fifteenth of their span. Unquantised weights fail
    quickly.
    """
    steps = np.diff(np.sort(np.append(weights.astype(np.float32), np.float32(0))))
    span = steps.sum()
    return not (steps[steps > 4 * OFF * span] < span / 16).any()


def _in_blocks(rows: Array, block: int) -> Array:
    padding = -rows.shape[1] % block
    return (np.pad(rows, ((0, 0), (0, padding))) if padding else rows).reshape(-1, block)


def _scales(rows: Array, usual: Sequence[int] = STEPS, inside: Callable[[Array], Array] | None = None) -> Array:
    """Return the scale of each row as float32: 0 if it has none, 1 for zeros.

    Parameters
    ----------
    rows : ndarray
        Weights [rows, columns].
    usual : sequence of int
        Possible integers of the largest weight.
    inside : callable, optional
        Test which rows of integers can be stored; the default is int8.
    """
    inside, parts = inside or _inside_int8, [rows[part] for part in _parts(rows)]
    largest = np.concatenate([np.abs(part).max(axis=1) for part in parts])
    first = int(np.argmax(largest > 0)) if largest.size else 0
    if not _has_steps(rows[first:first + 1], largest[first:first + 1], usual, inside):      # unquantised weights
        return np.where(largest == 0, 1, 0).astype(np.float32)
    ends = np.cumsum([len(part) for part in parts])
    return np.concatenate([_scales_of(part, some, usual, inside)
                           for part, some in zip(parts, np.split(largest, ends), strict=False)])


def _parts(rows: Array) -> list[slice]:
    """Divide rows into parts whose temporary arrays are small."""
    size = max(PART // max(rows.shape[1], 1), 1)
    return [slice(begin, begin + size) for begin in range(0, max(len(rows), 1), size)]


def _scales_of(rows: Array, largest: Array, usual: Sequence[int], inside: Callable[[Array], Array]) -> Array:
    """Return the scale of each row of a part, given its largest magnitude; see `_scales`."""
    is_short = rows.shape[1] <= SAMPLE
    if is_short:        # many rows: column by column, as reductions over a few adjacent elements are slow
        rows = np.ascontiguousarray(rows.T).T
    scales = np.where(largest == 0, 1, 0).astype(np.float32)        # 0 for NaN
    sample = _sample(rows)
    for steps in usual:
        open_ = np.flatnonzero(scales == 0)
        if not open_.size:
            break
        step = largest[open_] / np.float32(steps)
        fits = _fits(_taken(sample, open_), step, inside)
        open_, step = open_[fits], step[fits]
        if open_.size and not is_short:
            fits = _fits(rows[open_], step, inside)
            open_, step = open_[fits], step[fits]
        if open_.size:
            scales[open_] = _refined(_taken(rows, open_), step)
    return scales


def _sample(rows: Array) -> Array:
    """Return the columns that are tested first."""
    return rows if rows.shape[1] <= SAMPLE else rows[:, np.linspace(0, rows.shape[1] - 1, SAMPLE).astype(int)]


def _taken(rows: Array, which: Array) -> Array:
    """Return rows in the same memory order."""
    return rows[which] if rows.flags.c_contiguous else np.take(rows.T, which, axis=1).T


def _has_steps(first: Array, largest: Array, usual: Sequence[int], inside: Callable[[Array], Array]) -> bool:
    """Return True if the sample of the first nonzero row consists of integers for any number of steps."""
    if not largest.any():
        return True
    sample = _sample(first)
    every = np.broadcast_to(sample[0], (len(usual), sample.shape[1]))
    return bool(_fits(every, largest[0] / np.array(usual, np.float32), inside).any())


def _fits(rows: Array, step: Array, inside: Callable[[Array], Array]) -> Array:
    """Return, for each row, whether it consists of integers times its step that can be stored."""
    numbers = rows / step[:, None]
    whole = np.rint(numbers)
    return np.asarray(inside(whole) & (np.abs(numbers - whole) < OFF).all(axis=1))


def _inside_int8(whole: Array) -> Array:
    return np.asarray(((whole >= -128) & (whole <= 127)).all(axis=1))


def _inside_four_bits(whole: Array) -> Array:
    """Return which rows fit 4 bits with a suitable zero point."""
    return _span(whole) <= 15


def _inside_eight_bits(whole: Array) -> Array:
    """Return which rows fit 8 bits with a suitable zero point."""
    return _span(whole) <= 255


def _span(whole: Array) -> Array:
    return np.asarray(np.maximum(whole.max(axis=1), 0) - np.minimum(whole.min(axis=1), 0))


def _refined(rows: Array, step: Array) -> Array:
    """Return the step, or a neighbouring float, that reproduces most of the weights exactly."""
    whole = np.rint(rows / step[:, None])
    near = [step, np.nextafter(step, np.float32(np.inf)), np.nextafter(step, np.float32(0))]
    exact = [(whole * other[:, None] == rows).sum(axis=1) for other in near]
    return np.asarray(np.stack(near)[np.argmax(exact, axis=0), np.arange(len(step))])
