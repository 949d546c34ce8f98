"""Order of a contraction's K in chunks, and the matching layout of its weights.

K is cut into chunks of 16 bytes. A run of chunks is one tap's channels or, where pixels are adjacent in memory, all
taps of a kernel row; each run is padded with zeros. If the chunks of x are not contiguous, a table has the offset of
each from its pixel and its number of valid bytes, so that nothing outside the window is read.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from infer_server.engines.backends.cuda.codegen.copies import CHUNK
from infer_server.engines.backends.cuda.kernels.contraction.tile import Tile
from infer_server.engines.lowering.epilogue.program import store_meaning
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.problem import STORED, Array


@dataclass(frozen=True)
class Depth:
    """Chunks of a contraction's K per group. `aligned` is the alignment of x in bytes."""
    problem: Contraction
    aligned: int

    @property
    def size(self) -> int:
        """Bytes per element of x and of the weights."""
        return self.problem.x.size

    @property
    def grain(self) -> int:
        """Alignment of every chunk's address, up to CHUNK."""
        x, groups = self.problem.x, self.problem.groups
        return math.gcd(CHUNK, self.aligned, *x.strides[:-1], x.item, self.problem.cin * self.size if groups > 1 else 0)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Contiguous runs of x as (offset in bytes, elements), in the order of K."""
        problem, (*outer, columns) = self.problem, self.problem.taps
        steps = [d * stride for d, stride in zip(problem.dilation, problem.x.strides, strict=False)]
        if columns > 1 and problem.dilation[-1] == 1 and problem.groups == 1 and steps[-1] == problem.cin * self.size:
            return [(int(np.dot(tap, steps)), problem.cin * columns) for tap in np.ndindex(*outer, 1)]
        return [(int(np.dot(tap, steps)), problem.cin) for tap in np.ndindex(*problem.taps)]

    @cached_property
    def walk(self) -> Array:
        """Offset from the pixel and valid bytes of each chunk, int32 [chunks][2]."""
        chunks = [(offset + at, min(count * self.size - at, CHUNK)) for offset, count in self.runs
                  for at in range(0, count * self.size, CHUNK)]
        return np.array(chunks, np.int32)

    @property
    def straight(self) -> bool:
        """True if all chunks are contiguous in memory, and all but the last are full."""
        return bool(np.all(self.walk[:, 0] == np.arange(len(self.walk)) * CHUNK)
                    and np.all(self.walk[:-1, 1] == CHUNK))

    @property
    def bytes(self) -> int:
        """Valid bytes of all chunks."""
        return int(self.walk[:, 1].sum())

    @property
    def ragged(self) -> bool:
        """True if a chunk is not full."""
        return bool((self.walk[:, 1] < CHUNK).any())

    def turns(self, tile: Tile) -> int:
        """Return the number of stages for all of K."""
        return -(-len(self.walk) * CHUNK // tile.depth)


def columns(problem: Contraction, tile: Tile) -> int:
    """Return the number of couts of all groups, each group padded to whole tiles."""
    return problem.groups * -(-problem.cout // tile.couts) * tile.couts


def order(problem: Contraction, tile: Tile) -> Array:
    """Return the cout, within its group, of each row of the packed weights.

    mma gives a thread couts 2 t and 2 t + 1 of every 8; in this order they are neighbours, so that it can store them at
    once.
    """
    width, row = tile.part[1], np.arange(tile.part[1])
    cout = row % 8 // 2 * tile.lanes + row // 8 * 2 + row % 2
    blocks = columns(problem, tile) // problem.groups // width
    return np.tile((np.arange(blocks)[:, None] * width + cout).ravel(), problem.groups)


def pack(problem: Contraction, depth: Depth, tile: Tile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
    """Return the packed constants.

    Returns
    -------
    tuple of ndarray
        Weights [columns in `order`][K], program constants float32 [constant][columns], and the table of chunks if they
        are not contiguous.
    """
    rows = _source_rows(problem, tile)
    weights, real = _flat_weights(depth, problem.real_weights(constants)), rows < problem.groups * problem.cout
    table = np.zeros((len(rows), depth.turns(tile) * tile.depth // depth.size), weights.dtype)
    table[real, :weights.shape[1]] = weights[rows[real]]
    in_order = _source_rows(problem, tile, np.arange(columns(problem, tile)) % (len(rows) // problem.groups))
    there = in_order < problem.groups * problem.cout
    numbers = np.zeros((max(problem.program.constants, 1), len(rows)), np.float32)
    for row, constant in zip(numbers, constants["program"], strict=False):
        row[there] = np.broadcast_to(constant, problem.groups * problem.cout)[in_order[there]]
    if depth.straight:
        return table, numbers
    chunks = tile.depth // CHUNK
    ahead = (depth.turns(tile) + tile.stages) * chunks
    return table, numbers, np.pad(depth.walk, ((0, ahead - len(depth.walk)), (0, 0)))


def _source_rows(problem: Contraction, tile: Tile, couts: Array | None = None) -> Array:
    """Return each column's index among the couts of all groups, or groups * cout for padding."""
    couts = order(problem, tile) if couts is None else couts
    group = np.arange(len(couts)) // (len(couts) // problem.groups)
    missing = problem.groups * problem.cout
    return np.where(couts < problem.cout, group * problem.cout + couts, missing)


def _flat_weights(depth: Depth, weights: Any) -> Array:
    """Return the weights as [cout][K], with each run padded to whole chunks."""
    problem = depth.problem
    stored = np.asarray(weights, np.int8) if problem.precision == "int8" else store_meaning(
        STORED[problem.precision], np.asarray(weights, np.float32))
    flat = stored.reshape(len(stored), problem.cin, -1).swapaxes(1, 2).reshape(len(stored), -1)
    parts, at = [], 0
    for _, count in depth.runs:
        parts.append(np.pad(flat[:, at:at + count], ((0, 0), (0, -count % (CHUNK // depth.size)))))
        at += count
    return np.concatenate(parts, 1)
