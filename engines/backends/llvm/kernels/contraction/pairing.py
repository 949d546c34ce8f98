"""Pairing of INT8 weights whose products can be summed in 16 bits, for exact dot products by vpmaddubsw.

vpmaddubsw multiplies 32 bytes at once, twice as many as vpmaddwd, but adds neighbouring products in 16 bits, where it
saturates. A sum of two products u8 * s8 fits if its positive weights add up to at most 128, and its negative ones too
(255 * 128 < 2**15). Most pairs of weights fit, but all channels of a panel are multiplied with the same bytes of x, so
a pair must fit in each of them. The order of summation is free. Among 16 neighbours of x (a *window*) we pair elements
that fit in every channel, and a byte shuffle brings the bytes of x into that order. A weight without a partner stays
alone.

    step = 4 bytes taken from a window, for all channels     x:      b  k   n  a         indices in the window
                                                              w:     two pairs for each channel

A window of 16 takes four steps if all its elements have partners. The weights decide on the pairs and the number of
steps of a panel; both are data, and never part of the generated code.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 16             # bytes that a shuffle selects from
STEP = 4                # bytes of a step: two pairs
SLOTS = 2 * WINDOW      # enough for each element to have a pair to itself
BLOCK = 1 << 11         # windows paired at once, so that NumPy's tables stay in cache
LARGEST = 128           # greatest sum of the weights of one sign in a pair
ABSENT = -1

_BITS = np.left_shift(1, np.arange(WINDOW)).astype(np.uint16)
_ONES = np.unpackbits(np.arange(1 << WINDOW, dtype=np.uint16).view(np.uint8)).reshape(-1, WINDOW).sum(1, np.uint8)
_NO_PARTNER = np.uint8(WINDOW)

Array = NDArray[np.int8]


@dataclass(frozen=True)
class Paired:
    """Weights of a contraction in pairs."""
    steps: Array                    # [step][lane of the panel][STEP]
    sources: NDArray[np.int32]      # [step][2]: byte offset of the window from a pixel of x; STEP indices in the window
    starts: NDArray[np.int32]       # [panel + 1]: first step of each panel


def pair(weights: Array, offsets: NDArray[np.int64]) -> Paired:
    """Pair the weights so that no sum of two products leaves 16 bits, for any u8 x.

    Any weights can be paired.

    Parameters
    ----------
    weights : int8 [panel, lane, run, element of the run].
    offsets : int64 [run], bytes from a pixel of x to the start of the run.
    """
    panels, lanes, runs, length = weights.shape
    starts = window_starts(length)
    table = np.zeros((panels, runs, len(starts), WINDOW, lanes), np.int8)
    covered = 0
    for i, start in enumerate(starts):      # the earlier one of overlapping windows gets the weights
        part = weights[..., covered:start + WINDOW]
        table[:, :, i, covered - start:covered - start + part.shape[-1]] = part.transpose(0, 2, 3, 1)
        covered = start + WINDOW
    windows = table.reshape(-1, WINDOW, lanes)
    blocks = [_pair_windows(windows[first:first + BLOCK]) for first in range(0, len(windows), BLOCK)]
    steps, indices, counts = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    of_windows = (np.asarray(offsets)[:, None] + np.asarray(starts)).ravel()
    of_steps = np.repeat(np.tile(of_windows, panels), counts).astype(np.int32)
    first = np.concatenate([[0], np.cumsum(counts)])
    sources = np.stack([of_steps, indices.view(np.int32)[:, 0]], -1)
    return Paired(steps, sources, first[::len(of_windows)].astype(np.int32))


def window_starts(length: int) -> list[int]:
    """Return the starts of windows that cover a run of `length` bytes.

    They pass its end only if it is shorter than a window.
    """
    starts = list(range(0, max(length - WINDOW, 0), WINDOW))
    return [*starts, max(length - WINDOW, 0)]


def _pair_windows(windows: Array) -> tuple[Array, NDArray[np.uint8], NDArray[np.int64]]:
    """Pair the weights [n, WINDOW, lanes] of n windows.

    Returns the steps of all windows [step][lane][STEP], their indices in the window [step][STEP], and the number of
    steps of each window.
    """
    slots = _partners(_fitting(windows), np.bitwise_or.reduce(windows.any(axis=2) * _BITS, axis=1))
    counts = -(-(slots != ABSENT).any(axis=2).sum(axis=1) * 2 // STEP)
    taken = slots.reshape(-1, SLOTS // STEP, STEP)[np.arange(SLOTS // STEP) < counts[:, None]]
    owner = np.repeat(np.arange(len(windows)), counts)
    weights = windows[owner[:, None], taken] * (taken != ABSENT)[..., None]         # [step][STEP][lane]
    return np.ascontiguousarray(weights.swapaxes(1, 2)), np.maximum(taken, 0).astype(np.uint8), counts


def _fitting(windows: Array) -> NDArray[np.uint16]:
    """Return [WINDOW, n] bit sets for weights [n, WINDOW, lanes]: the elements that each element can be paired with."""
    signed = windows.transpose(2, 1, 0).astype(np.int16)                            # [lane][element][n]
    sums = np.concatenate([np.maximum(signed, 0), np.maximum(-signed, 0)]).astype(np.uint8)
    room = LARGEST - sums
    fitting = np.zeros(sums.shape[1:], np.uint16)
    for a in range(WINDOW - 1):
        fits = (sums[:, a:a + 1] <= room[:, a + 1:]).all(axis=0)                    # [element after a][n]
        fitting[a] |= np.bitwise_or.reduce(fits * _BITS[a + 1:, None], axis=0)
        fitting[a + 1:] |= fits * _BITS[a]
    return fitting


def _partners(fitting: NDArray[np.uint16], free: NDArray[np.uint16]) -> NDArray[np.int8]:
    """Choose pairs greedily: [n][pair][2] elements of each window, ABSENT for none.

    The elements with the fewest possible partners choose first, and take the partner with the fewest. fitting: [WINDOW,
    n] from `_fitting`; free: [n], bit sets of the elements to be paired.
    """
    n = len(free)
    columns, free = np.arange(n), free.copy()
    slots = np.full((n, SLOTS // 2, 2), ABSENT, np.int8)
    count = np.zeros(n, np.int64)
    for _ in range(WINDOW // 2):
        possible = _ONES[fitting & free]
        possible[(possible == 0) | (free & _BITS[:, None] == 0)] = _NO_PARTNER
        a = possible.argmin(axis=0)
        found = possible[a, columns] < _NO_PARTNER
        b = np.where(fitting[a, columns] & _BITS[:, None], possible, _NO_PARTNER).argmin(axis=0)
        slots[columns[found], count[found]] = np.stack([a, b], -1)[found]
        count += found
        free &= ~np.where(found, _BITS[a] | _BITS[b], 0).astype(np.uint16)
    for element in range(WINDOW):
        alone = np.flatnonzero(free & _BITS[element])
        slots[alone, count[alone], 0] = element
        count[alone] += 1
    return slots
