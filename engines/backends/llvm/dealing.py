"""INT8 dot products summed in 16 bits, exactly: the weights are dealt to sums that cannot overflow.

vpmaddubsw multiplies 32 bytes at once, twice as many as vpmaddwd, and adds neighbours in 16 bits, where it saturates. A
sum of u8 * s8 fits if its positive weights add up to no more than 128, and its negative ones too (255 * 128 < 2**15).
So each channel's weights are dealt to such sums when they are packed. The bytes of x follow: a byte shuffle picks from
16 neighbours (a *window*) those that a channel's sums take.

    turn = 8 bytes of a window for each channel:     lane of 32 bits        |  sum 0  |  sum 1  |
      two vectors of picks: places in the window       first vector         |  a   b  |  e   f  |
      two vectors of weights, s8                       second vector        |  c   d  |  g   h  |
      sum 0 = a + b + c + d, sum 1 = e + f + g + h in 16 bits, then both into the accumulator

A window of 16 bytes takes two turns, or as many as its hardest channel needs: how many turns a panel has is decided by
its weights. It is data, never text.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backends.llvm.emit import I8, I32, I64, Function, Value, vector
from engines.backends.llvm.isa import Isa

WINDOW = 16             # bytes that a shuffle picks from
SUMS, SLOTS = 2, 4      # of a turn, for a channel: sums, and products in each
BLOCK = 1 << 12         # windows dealt side by side: their sums stay in cache
ROOM = WINDOW * SLOTS   # slots of a channel, one weight to a sum
FULL = np.int16(1 << 13)
LINE = 64               # bytes that the caches move at once
LARGEST = 128           # what the weights of one sign may add up to in a sum

Array = NDArray[np.int8]


@dataclass(frozen=True)
class Dealt:
    turns: NDArray[np.uint8]        # [turn][picks, picks, weights, weights][lane][4]
    offsets: NDArray[np.int32]      # [turn]: bytes from a pixel of x to the turn's window
    starts: NDArray[np.int32]       # [panel + 1]: the panel's first turn


def deal(weights: Array, offsets: NDArray[np.int64]) -> Dealt:
    """weights: [panel, lane, run, element of the run]; offsets: [run], bytes from a pixel of x to the run's start."""
    panels, lanes, runs, length = weights.shape
    starts = window_starts(length)
    table = np.zeros((panels, lanes, runs, len(starts), WINDOW), np.int8)
    covered = 0
    for i, start in enumerate(starts):      # where windows overlap, the earlier one has the weights
        part = weights[..., covered:start + WINDOW]
        table[..., i, covered - start:covered - start + part.shape[-1]] = part
        covered = start + WINDOW
    # A window is dealt for all channels of its panel together.
    windows = table.reshape(panels, lanes, -1, WINDOW).transpose(0, 2, 1, 3)
    picks, dealt, needed = _deal_channels(windows.reshape(-1, WINDOW))
    counts = needed.reshape(-1, lanes).max(axis=1)              # of each window of each panel
    first = np.concatenate([[0], np.cumsum(counts)])
    turns = np.zeros((first[-1], 4, lanes, 4), np.uint8)
    for count in np.unique(counts):
        rows = np.flatnonzero(counts == count)
        at = first[rows, None] + np.arange(count)
        turns[at, :2] = _vectors(picks.reshape(-1, lanes, ROOM)[rows], count)
        turns[at, 2:] = _vectors(dealt.view(np.uint8).reshape(-1, lanes, ROOM)[rows], count)
    places = (np.asarray(offsets)[:, None] + np.asarray(starts)).ravel()
    return Dealt(turns, np.repeat(np.tile(places, panels), counts).astype(np.int32),
                 first[::len(places)].astype(np.int32))


def window_starts(length: int) -> list[int]:
    """Windows that cover a run of `length` bytes: they reach beyond its end only if it is shorter than one."""
    starts = list(range(0, max(length - WINDOW, 0), WINDOW))
    return [*starts, max(length - WINDOW, 0)]


def _vectors(slots: NDArray[np.uint8], turns: int) -> NDArray[np.uint8]:
    """[window][lane][ROOM] -> [window][turn][vector][lane][4]: slots 0 and 1 of a sum are in the first vector."""
    windows, lanes, _ = slots.shape
    table = slots[..., :turns * SUMS * SLOTS].reshape(windows, lanes, turns, SUMS, 2, 2)
    return table.transpose(0, 2, 4, 1, 3, 5).reshape(windows, turns, 2, lanes, 4)


def _deal_channels(windows: Array) -> tuple[NDArray[np.uint8], Array, NDArray[np.int64]]:
    """[n, WINDOW] weights -> [n, ROOM] for each slot which element it takes and its weight, [n] turns.

    The rule: the largest first, each to the sum that has least of its sign (Graham's LPT); in as few turns as it
    manages. ROOM is enough for any window.
    """
    picks, dealt = np.zeros((len(windows), ROOM), np.uint8), np.zeros((len(windows), ROOM), np.int8)
    needed = np.zeros(len(windows), np.int64)
    filled = np.count_nonzero(windows, axis=1)
    left = np.arange(len(windows))
    for turns in range(1, WINDOW // SUMS + 1):
        tried = left[filled[left] <= turns * SUMS * SLOTS]
        for first in range(0, len(tried), BLOCK):
            rows = tried[first:first + BLOCK]
            picks[rows], dealt[rows], fits = _largest_first(windows[rows], turns * SUMS)
            needed[rows[fits]] = turns
        left = left[needed[left] == 0]
    return picks, dealt, needed


def _largest_first(windows: Array, sums: int) -> tuple[NDArray[np.uint8], Array, NDArray[np.bool_]]:
    """picks, weights, and for each window whether all found room; where not, the other two are good for nothing."""
    n, columns = len(windows), np.arange(len(windows))
    size = np.abs(windows.astype(np.int16))
    order = np.sort((255 - size) * WINDOW + np.arange(WINDOW, dtype=np.int16), axis=1) % WINDOW
    # Of each sum: its weights of either sign added up, and how many they are.
    positive, negative, count = np.zeros((3, sums, n), np.int16)
    picks, dealt = np.zeros((ROOM, n), np.uint8), np.zeros((ROOM, n), np.int8)
    fits = np.ones(n, bool)
    for element in np.ascontiguousarray(order.T):
        weight, amount = windows[columns, element], size[columns, element]
        up = weight > 0
        load = np.where(up, positive, negative)
        best = np.argmin(load * np.int16(SLOTS) + count + (count == SLOTS) * FULL, axis=0)
        taken = count[best, columns]
        fits &= (taken < SLOTS) & (load[best, columns] + amount <= LARGEST) | (weight == 0)
        slot = np.minimum(best * SLOTS + taken, ROOM - 1)
        picks[slot, columns] = np.where(weight == 0, picks[slot, columns], element)
        dealt[slot, columns] += weight
        positive[best, columns] += amount * up
        negative[best, columns] += amount * ~up
        count[best, columns] += weight != 0
    return picks.T, dealt.T, fits


# ---- code
def turn_bytes(isa: Isa) -> int:
    """Of a turn of one vector of couts, in memory."""
    return 4 * isa.bytes


def emit_turns(f: Function, isa: Isa, acc: dict[Any, Value], pixels: Sequence[int], prefetch: bool) -> None:
    """All turns of a panel into acc {(pixel, 0): int32 of a vector of couts}. pixels: bytes of x to each. prefetch: ask
    for the next panel, which follows.

    f's parameters `w`, `offsets` and `count` are the panel's turns; `x` is the first pixel.
    """
    at = {key: f.parameters[key] for key in ("w", "offsets")}
    panel = f.parameters["count"] * turn_bytes(isa)
    for _ in f.loop("turn", f.parameters["count"], acc=acc, at=at):
        offset = f.cast("sext", f.load(I32, at["offsets"], 4, "offset"), I64, "offset")
        picks, weights = (tuple(f.load(vector(isa.bytes, I8), at["w"] + i * isa.bytes, isa.bytes, hint)
                                for i in places) for hint, places in (("picks", (0, 1)), ("weights", (2, 3))))
        for p, pixel in enumerate(pixels):
            bytes_ = f.load(vector(WINDOW, I8), f.parameters["x"] + offset + pixel, hint="bytes")
            window = f.shuffle(bytes_, None, [i % WINDOW for i in range(isa.bytes)], "window")
            acc[p, 0] = isa.dealt_dot(acc[p, 0], window, picks, weights)
        if prefetch:
            for line in range(0, turn_bytes(isa), LINE):
                isa.prefetch(at["w"] + panel + line)
        at["w"] += turn_bytes(isa)
        at["offsets"] += 4
