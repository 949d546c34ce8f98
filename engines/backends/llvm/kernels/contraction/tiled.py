"""Base class of the tiled kernels of a contraction: the division into tiles, and the cost of a tile.

    for block of pixels:                           its rows of x stay in cache for all panels
      for panel of couts:                          its weights stay in cache for all tiles
        for tile of pixels:                        a call of the micro-kernel:
          for tap: for k: for pixel: for vector:
            acc[pixel, vector] = dot(acc[pixel, vector], x[pixel, k], w[vector, k])       all in registers
          program, store

If the taps of a kernel row and their channels are contiguous, they are one K loop (a run). A run is rounded up to whole
steps with zero weights, so that up to 15 bytes past its end are read.

The planes of volumes, of all items, are numbered like the items of a batch; the taps then have planes too.

The pixels are divided into rows of the grid in one of two ways:
  by item   the rows of tiles of each item's image; every tail is known when the kernel is built
  by batch  items of few pixels (a matrix product with one row each) form one long row of pixels, whose length is known
            at run time, and whose tail is divided into tiles of 8, 4, 2, 1 pixels. One kernel then serves a batch of
            one row as well as one of many rows
"""
from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import ClassVar

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import TAILS
from infer_server.engines.backends.llvm.kernels.common.arithmetic import Arithmetic, arithmetic_for
from infer_server.engines.backends.llvm.kernels.common.cost import epilogue, first_reading, pieces, pushed_out, reading
from infer_server.engines.backends.llvm.kernels.contraction.panels import rows_with_zeros
from infer_server.engines.backends.llvm.kernels.contraction.planes import Planes
from infer_server.engines.backends.llvm.kernels.contraction.taps import TapAxis
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import View
from infer_server.engines.plan.plan import SLACK

FEW_PIXELS = 8          # items with at most this many pixels are divided by batch
HIDDEN_CALL = 3         # cycles of a micro-kernel's call that do not overlap with the last sums of the tile before
BLOCK_BYTES = 256 << 10     # bytes of pixels in a block that should stay in L2 for all panels


@dataclass(frozen=True)
class Tile(Tactic):
    """Tactic of a contraction: a micro-kernel computes rows x cols pixels by `vectors` of couts, all in registers."""
    rows: int
    cols: int
    vectors: int            # 1, 2 or 4
    block: int = 0          # rows of tiles in a block of pixels; 0: all of them
    prefetch: bool = False  # prefetch the next panel's weights in the K loop
    skip: bool = False      # skip taps that read only the zero border
    layout: ClassVar[str] = ""      # name of the weight layout, unless it is the direct kernel's

    @property
    def shape(self) -> tuple[int, int]:
        """Return (pixels, vectors)."""
        return self.rows * self.cols, self.vectors

    def __str__(self) -> str:
        words = (f"tile {self.rows}x{self.cols}x{self.vectors}", self.layout,
                 f"block {self.block}" if self.block else "",
                 "prefetch" if self.prefetch else "", "skip" if self.skip else "")
        return " ".join(filter(None, words))


class TiledContraction(Kernel[Contraction]):
    """Contraction divided into tiles. A subclass defines the sums of a tile and the layout of its weights."""
    tile: ClassVar[type[Tile]] = Tile
    skips_taps: ClassVar[bool] = False      # True if there are tactics with Tile.skip

    @abstractmethod
    def tile_shapes(self, isa: Isa) -> Sequence[tuple[int, int]]:
        """Return (pixels, vectors) of tiles worth trying, the usual winner first; none if the kernel does not apply."""

    @abstractmethod
    def turns_and_bytes(self, isa: Isa, vectors: int) -> tuple[float, int]:
        """Return the iterations of all K loops of a tile, and the bytes of one vector's weights in each."""

    @abstractmethod
    def turn_cycles(self, isa: Isa, pixels: int, vectors: int, tile: Tile) -> float:
        """Return the cycles of one iteration of a K loop, including its prefetches."""

    # ---- planes
    @cached_property
    def planes(self) -> Planes:
        return Planes.of(self.problem)

    @property
    def image(self) -> Contraction:
        """Return the convolution within one plane."""
        return self.planes.image

    # ---- traversal of x
    @cached_property
    def one_run(self) -> bool:
        """Return True if the taps of a kernel row are contiguous in memory."""
        problem = self.image
        return problem.groups == 1 and (problem.taps[1] == 1 or (
            problem.dilation[1] == 1 and problem.x.strides[1] == problem.cin * problem.x.size))

    @property
    def run(self) -> int:
        """Return the elements of x that one K loop reads."""
        return self.image.cin * self.image.taps[1] if self.one_run else self.image.cin

    def run_offsets(self) -> Array:
        """Return the bytes from tap (0, 0) to the start of each run."""
        problem, (rows, columns) = self.image, self.image.taps
        offsets = (np.arange(n) * step for n, step in (
            (self.planes.taps, self.planes.tap_step), (rows, problem.dilation[0] * problem.x.strides[0]),
            (1 if self.one_run else columns, problem.dilation[1] * problem.x.strides[1])))
        return np.asarray(reduce(np.add.outer, offsets)).ravel()

    def runs(self, weights: Array) -> Array:
        """Convert weights [cout of all groups, cin, *taps] to [cout][run][element of the run].

        A last cout of zeros serves lanes without a cout.
        """
        taps_last = np.moveaxis(weights.reshape(-1, self.problem.cin, *self.problem.taps), 1, -1)
        return rows_with_zeros(taps_last.reshape(len(taps_last), -1, self.run))

    def arithmetic(self, isa: Isa) -> Arithmetic:
        return arithmetic_for(self.problem.precision, isa, self.problem.weights)

    def steps(self, isa: Isa) -> int:
        """Return the iterations of one K loop, which does one step of the arithmetic in each."""
        return -(-self.run // self.arithmetic(isa).elements)

    def turns(self, isa: Isa) -> int:
        """Return the iterations of all K loops of a pixel."""
        return self.steps(isa) * self.planes.taps * self.image.taps[0] * (1 if self.one_run else self.image.taps[1])

    @cached_property
    def axes(self) -> tuple[TapAxis, TapAxis]:
        """Return the row axis and the column axis."""
        problem, border = self.image, self.image.border
        edges = ((border.top, border.bottom), (border.left, border.right))
        rows, cols = (TapAxis(problem.x.shape[a], *edges[a], problem.taps[a], problem.stride[a], problem.dilation[a])
                      for a in (0, 1))
        return rows, cols

    # ---- division of the pixels
    @cached_property
    def flat(self) -> Contraction:
        """Return `image` as one long row of pixels if its rows are contiguous and the kernel is 1x1; else `image`."""
        def joined(view: View) -> View:
            return replace(view, shape=(1, view.shape[0] * view.shape[1], view.shape[2]))

        problem = self.image
        if problem.taps != (1, 1) or problem.stride != (1, 1) or problem.rows == 1:
            return problem
        views = (problem.x, problem.y, *problem.operands)
        if not all(v.strides[0] == v.shape[1] * v.strides[1] for v in views):
            return problem
        return replace(problem, x=joined(problem.x), y=joined(problem.y), operands=tuple(map(joined, problem.operands)))

    @cached_property
    def by_batch(self) -> bool:
        """Return True if the pixels of all items form one long row, and an item has too few of them to fill tiles."""
        flat = self.flat
        return (not self.planes.of_volumes and flat.rows == 1 and flat.cols <= FEW_PIXELS and flat.taps == (1, 1)
                and flat.stride == (1, 1)
                and all(v.item == v.shape[1] * v.strides[1] for v in (*flat.inputs, *flat.outputs)))

    def block_of_the_batch(self, tile: Tile) -> int:
        """Return the pixels of a block, if the problem is divided by batch."""
        kept = self.flat.x if self.problem.scaled is None else self.flat.y
        return tile.cols * (tile.block or self._fitting(tile, kept))

    def block(self, tile: Tile) -> int:
        """Return the rows of tiles in a block of an item's pixels."""
        if tile.block or self.problem.scaled is None:
            return tile.block or self.tile_rows(tile)
        return self._fitting(tile, self.problem.y)

    def scratch_bytes(self, tile: Tile) -> int:
        """Return the bytes of a block's rows that are no output of the problem: 0 if there are none."""
        problem = self.problem
        if problem.y in problem.outputs:
            return 0
        pixels = self.block_of_the_batch(tile) if self.by_batch else self.block(tile) * tile.cols
        return pixels * problem.y.strides[1] + SLACK

    @staticmethod
    def _fitting(tile: Tile, view: View) -> int:
        """Return the rows of tiles whose pixels in this view have BLOCK_BYTES, for matrix products."""
        return max(BLOCK_BYTES // (tile.cols * view.strides[1]), 1)

    def widths(self, tile: Tile) -> list[int]:
        """Return the pixels of each tile across a row, as even as possible.

        A narrow last tile would wait for its accumulators, and take as long as one twice as wide.
        """
        cols = self.flat.cols
        count = -(-cols // tile.cols)
        narrow, wider = divmod(cols, count)
        return [narrow + 1] * wider + [narrow] * (count - wider)

    def tile_rows(self, tile: Tile) -> int:
        """Return the rows of tiles of an item, or of a plane of it; for one long row of pixels, its tiles."""
        if self.flat.rows == 1:
            return -(-self.flat.cols // tile.cols)
        return -(-self.problem.rows // tile.rows)

    def grid(self, isa: Isa, tactic: Tile) -> Grid:
        groups, cout = self.problem.groups, self.problem.cout
        columns = groups if groups > 1 else -(-cout // (tactic.vectors * isa.lanes))
        if self.problem.scaled is not None:     # rows are scaled once all of their panels are computed
            columns = 1
        return Grid(self.flat.cols if self.by_batch else self.planes.count * self.tile_rows(tactic), 1, columns)

    def windows(self, isa: Isa, tactic: Tile) -> Sequence[Window]:
        flat, planes = self.flat, self.planes
        if planes.of_volumes:
            rows, reach = self.tile_rows(tactic), (planes.taps - 1) * self.problem.dilation[0] + 1
            return [Window.along(self.problem.x, 0, rows, self.problem.stride[0], count=reach),
                    *(Window.along(view, 0, rows) for view in (*self.problem.operands, self.problem.y))]
        axis, size = (1, tactic.cols) if flat.rows == 1 else (0, tactic.rows)
        size = 1 if self.by_batch else size
        read = (size - 1) * flat.stride[axis] + (flat.taps[axis] - 1) * flat.dilation[axis] + 1
        return [Window.along(flat.x, axis, 1, size * flat.stride[axis], count=read),
                *(Window.along(view, axis, 1, size, count=size) for view in (*flat.operands, *flat.outputs))]

    # ---- tactics
    def tactics(self, isa: Isa) -> Sequence[Tile]:
        """Return the tile shapes that the number of pixels and couts can fill. `refinements` adds their blocks."""
        problem, shapes = self.problem, self.tile_shapes(isa)
        widest = isa.vectors_for(problem.cout)
        found: dict[Tile, None] = {}
        for cols, vectors in shapes:
            vectors = min(vectors, widest)
            cols = min(cols, self.flat.cols * self.items)
            found[self.tile(1, cols, vectors)] = None
            if problem.border and self.skips_taps:
                found[self.tile(1, cols, vectors, skip=True)] = None
            most = max((cols for cols, v in shapes if v >= vectors), default=1)
            if self.flat.rows > 1 and cols == self.flat.cols and 2 * cols <= most:
                found[self.tile(2, cols, vectors)] = None
        return tuple(found)

    def refinements(self, isa: Isa, best: Tile) -> Sequence[Tile]:
        """Return the best tile with its pixels divided into blocks, with and without prefetch."""
        blocks = [0] if self.by_batch else [0, *(b for b in (1, 2, 4, 8, 16) if b < self.tile_rows(best))]
        if self.scratch_bytes(best):
            blocks = [b for b in blocks if b <= self._fitting(best, self.problem.y)]
        weights = self.turns(isa) * self.problem.cout * self.arithmetic(isa).step_bytes
        return tuple(replace(best, block=block, prefetch=prefetch) for block in blocks
                     for prefetch in ((False, True) if weights >= 1 << 16 else (False,)))

    def constant_bytes(self, isa: Isa, tactic: Tile) -> int:
        turns, weight_bytes = self.turns_and_bytes(isa, tactic.vectors)
        panels = pieces(self.problem.cout, tactic.vectors * isa.lanes)
        vectors = sum(isa.vectors_for(couts) * times for couts, times in panels)
        return int(turns * weight_bytes * vectors * self.problem.groups)

    def code_size(self, isa: Isa, tactic: Tile) -> int:
        panels = {isa.vectors_for(couts) for couts, _ in pieces(self.problem.cout, tactic.vectors * isa.lanes)}
        tiles = (tiles_of_the_batch(self.items * self.flat.cols, tactic.cols) if self.by_batch
                 else self._tiles_of_an_item(tactic))
        return sum(panels) * sum({pixels for pixels, _ in tiles}) * (2 if tactic.skip else 1)

    def unseen(self, isa: Isa, tactic: Tile) -> float:
        """Return the gain of prefetching weights while the tiles before the next panel run.

        A single tile is too short for it.
        """
        return isa.prefetched if tactic.prefetch and self.tile_rows(tactic) > 1 else 1.0

    def packing(self, tactic: Tile) -> int:
        return tactic.vectors

    # ---- cost
    def cost(self, isa: Isa, tactic: Tile) -> float:
        return sum(self._cycles(isa, tactic, items) / items for items in {1, self.items})

    def _cycles(self, isa: Isa, tactic: Tile, items: int) -> float:
        """Estimate the cycles of a batch, from all tiles and the memory traffic of weights and x."""
        problem = self.problem
        panels = pieces(problem.cout, tactic.vectors * isa.lanes)
        if self.by_batch:
            pixels = items * self.flat.cols
            tiles, blocks = tiles_of_the_batch(pixels, tactic.cols), -(-pixels // self.block_of_the_batch(tactic))
        else:
            tile_rows = self.tile_rows(tactic)
            blocks = items * self.planes.count * -(-tile_rows // self.block(tactic))
            tiles = self._tiles_of_an_item(tactic)
        total, weights = 0.0, 0.0
        for couts, times in panels:
            vectors = isa.vectors_for(couts)
            turns, weight_bytes = self.turns_and_bytes(isa, vectors)
            size = turns * vectors * weight_bytes
            weights += times * size
            total += times * sum(count * (self._tile_cost(isa, pixels, vectors, tactic) + reading(size))
                                 for pixels, count in tiles)
        x = items * math.prod(problem.x.shape) * problem.x.size / blocks / problem.groups
        total += reading(x, blocks * (sum(times for _, times in panels) - 1))
        again = reading(weights, (blocks - 1) * (0.5 if tactic.prefetch else 1))
        return problem.groups * (total + first_reading(weights, tactic.prefetch) + again)

    def _tiles_of_an_item(self, tile: Tile) -> list[tuple[int, int]]:
        """Return (pixels, number of tiles) for each size of tile in an item."""
        planes, flat = self.planes.count, self.flat
        widths = Counter(self.widths(tile)).items() if flat.rows > 1 else pieces(flat.cols, tile.cols)
        return [(height * width, planes * count * times) for height, count in pieces(flat.rows, tile.rows)
                for width, times in widths]

    def _tile_cost(self, isa: Isa, pixels: int, vectors: int, tile: Tile) -> float:
        program = self.problem.program
        end = epilogue(len(program.instructions), len(self.problem.operands), vectors, pixels) * (pixels * vectors)
        pitch = self.problem.x.strides[-2] * self.problem.stride[-1]
        cycles = self.turn_cycles(isa, pixels, vectors, tile) + pushed_out(pixels, pitch)
        return self.turns_and_bytes(isa, vectors)[0] * cycles + end.congested_cycles + HIDDEN_CALL


def tiles_of_the_batch(pixels: int, cols: int) -> list[tuple[int, int]]:
    """Return (pixels, number of tiles) for each tile size, when a batch's pixels are divided into tiles of `cols`.

    What remains is divided into tiles of the sizes in TAILS.
    """
    whole, rest = divmod(pixels, cols)
    return [(size, count) for size, count in ((cols, whole), *((tail, 1) for tail in TAILS if rest & tail)) if count]
