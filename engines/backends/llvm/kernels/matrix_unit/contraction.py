"""Contraction on a matrix unit: its tactics, packed weights and cost. loops.py emits its code.

    for block of pixels:                                            }
      for panel of couts:                                           }  as in every tiled contraction: tiled.py, loops.py
        for tile of pixels:                                         }  there
          for tap row, tap column, block of up to 64 bytes of K:
            b[v] = weights of 16 couts                              a load of 1 KiB, packed as it lies in the register
            a[t] = x of 16 pixels                                   a row for each pixel, a pitch apart
            c[t, v] += a[t] * b[v]                                  16 pixels x 16 couts x 64 bytes of K
          c -> scratch in L1
          program, store                                            as in every contraction (store.py)

x is read in place: the pitch of a register's rows is the distance of the pixels that neighbouring outputs read, so
strides, dilation and halos cost nothing.

All blocks of K have one size. In INT8 the last block of a run begins earlier if the run is not a multiple of it, with
zero weights for what was summed before; it reads at most 3 bytes past the run. Zero times infinity is NaN, so blocks of
floats must divide the run; a short run with an odd number of floats is copied and padded with zeros.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, ClassVar

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.tiles import AMX, MatrixUnit
from infer_server.engines.backends.llvm.kernels.common.cost import pieces
from infer_server.engines.backends.llvm.kernels.contraction.panels import cout_panels, pack_program
from infer_server.engines.backends.llvm.kernels.contraction.tiled import Tile, TiledContraction
from infer_server.engines.backends.llvm.kernels.kernel import solves
from infer_server.engines.backends.llvm.kernels.matrix_unit.loops import MatrixLoops
from infer_server.engines.backends.llvm.kernels.matrix_unit.registers import PixelRuns
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.problems.convolution import Contraction, ScaledContraction
from infer_server.engines.lowering.problems.problem import Array

LEAST_DEPTH = 32        # least bytes of K in each of several blocks of floats; shorter ones waste half a product
LEAST_RUN = 16          # least bytes of K in a run that is one block
COPY_CYCLES = 1.5       # cycles to copy a pixel's run: a load and a store
FAR_WEIGHTS = 1280 << 10    # bytes above which weights do not stay in L2
TOGETHER_BYTES = 1 << 20    # bytes of x of several items that fit L2
MOST_SUMS = 4           # accumulator registers; the others hold operands
# (pixels, vectors): 2 x 2, 1 x 4, 1 x 2, 2 x 1 and 1 x 1 accumulators. 28 divides 196 and 784 pixels.
SHAPES = ((32, 2), (28, 2), (16, 4), (14, 4), (16, 2), (32, 1), (16, 1))


@dataclass(frozen=True)
class AmxTile(Tile):
    """Tactic of the matrix-unit kernel."""
    layout: ClassVar[str] = "amx"


@solves(ScaledContraction)
@solves(Contraction)
class MatrixUnitContraction(TiledContraction):
    """Contraction on a matrix unit. Weights are packed [panel][block of K][vector][quad][lane][byte]."""
    tile = AmxTile
    unit: ClassVar[MatrixUnit] = AMX

    def applies(self, isa: Isa) -> bool:
        if isa.matrix is None or not isa.matrix.product(self.problem.precision) or self.problem.weights:
            return False
        return self.exact or self.depth >= (LEAST_RUN if self.run_bytes <= self.unit.row_bytes else LEAST_DEPTH)

    def tile_shapes(self, isa: Isa) -> Sequence[tuple[int, int]]:
        return SHAPES if self.applies(isa) else ()

    def tactics(self, isa: Isa) -> Sequence[Tile]:
        tiles = dict.fromkeys((*super().tactics(isa), *self._tall_tiles(isa)))
        return [tile for tile in tiles if len(self.cut(tile.rows, tile.cols).runs) * tile.vectors <= MOST_SUMS]

    def _tall_tiles(self, isa: Isa) -> Iterator[Tile]:
        """Yield tiles of as many whole rows as the accumulators hold, for images with few columns."""
        flat = self.flat
        if flat.rows == 1 or flat.cols > self.unit.rows or not self.applies(isa):
            return
        for vectors in (1, 2, 4):
            registers = MOST_SUMS // vectors
            in_one_run = (registers * self.unit.rows - flat.cols) // self.wide + 1 if self.wide else 0
            for rows in {min(most, flat.rows) for most in (registers, in_one_run)}:
                if rows > 1 and vectors <= isa.vectors_for(flat.cout):
                    yield self.tile(-(-flat.rows // -(-flat.rows // rows)), flat.cols, vectors)

    @cached_property
    def wide(self) -> int:
        """Return the positions between the first pixels of two rows, as PixelRuns counts them.

        The result is 0 if that is not a whole number, or if too many positions between rows would be computed and
        discarded.
        """
        x, stride = self.flat.x, self.flat.stride
        row, column = x.strides[0] * stride[0], x.strides[1] * stride[1]
        return index(row // column) if row % column == 0 and 2 * row // column <= 3 * self.flat.cols else 0

    def cut(self, rows: int, cols: int) -> PixelRuns:
        """Return the faster division of a tile into registers: one run through all its rows, or runs of its rows."""
        apart = PixelRuns(rows, cols)
        if rows == 1 or cols != self.flat.cols or not self.wide:
            return apart
        return min(PixelRuns(rows, cols, self.wide), apart,
                   key=lambda cut: sum(self.unit.cycles(positions) for _, _, positions in cut.runs))

    @property
    def exact(self) -> bool:
        return self.problem.precision == "int8"

    @cached_property
    def items_together(self) -> int:
        """Return the items that are processed with one panel of weights before the next panel is read.

        If the weights of all panels do not stay in L2 from one item to the next, it is as many items as fit L2.
        """
        problem = self.problem
        if not self._far_weights or self.planes.of_volumes or problem.scaled is not None:
            return 1
        return max(TOGETHER_BYTES // (math.prod(problem.x.shape) * problem.x.size), 1)

    @property
    def _far_weights(self) -> bool:
        """Return True if the weights of all panels do not stay in cache from one item to the next."""
        problem = self.problem
        return problem.groups * problem.cout * len(self.run_offsets()) * self.run_bytes > FAR_WEIGHTS

    def refinements(self, isa: Isa, best: Tile) -> Sequence[Tile]:
        """Return the refinements of tiled contractions that pay here.

        Only weights that do not stay in cache are prefetched; they are not read again for several blocks of an item.
        """
        far, together = self._far_weights, self.items_together > 1
        return list(dict.fromkeys(tile for tile in super().refinements(isa, best)
                                  if (far or not tile.prefetch) and not (together and tile.block)))

    def unseen(self, isa: Isa, tactic: Tile) -> float:
        """Return 1: prefetches gain 3 % at most and may lose, so they must win by measured time."""
        return 1.0

    # ---- K
    @property
    def run_bytes(self) -> int:
        return self.run * self.problem.x.size

    @cached_property
    def depth(self) -> int:
        """Return the bytes of x in a block of K, a multiple of the unit's group.

        The result is 0 if a run of floats has no such divisor.
        """
        group = self.unit.group
        if self.exact:
            return min(self.unit.row_bytes, -(-self.run // group) * group)
        groups = self.run_bytes // group * (self.run_bytes % group == 0)
        if self.staged:
            return -(-self.run_bytes // group) * group
        divisors = (n for n in range(1, self.unit.row_bytes // group + 1) if groups and groups % n == 0)
        return group * max(divisors, default=0)

    @property
    def staged(self) -> bool:
        """Return True if runs of floats are copied and padded with zeros."""
        unit, size = self.unit, self.run_bytes
        return not self.exact and size <= unit.row_bytes and size % unit.group != 0

    @cached_property
    def block_starts(self) -> list[int]:
        """Return the bytes from the start of a run to each of its blocks."""
        starts = list(range(0, self.run_bytes, self.depth))
        group = self.unit.group
        starts[-1] = max(min(starts[-1], -(-(self.run_bytes - self.depth) // group) * group), 0)
        return starts

    def turns_and_bytes(self, isa: Isa, vectors: int) -> tuple[float, int]:
        return len(self.block_starts) * len(self.run_offsets()), self.depth * isa.lanes

    # ---- cost
    def turn_cycles(self, isa: Isa, pixels: int, vectors: int, tile: Tile) -> float:
        runs = self.cut(pixels // tile.cols or 1, min(pixels, tile.cols)).runs
        products = vectors * sum(self.unit.cycles(positions) for _, _, positions in runs)
        copies = COPY_CYCLES * pixels if self.staged else 0.0
        return max(products, self.unit.load_cycles * (len(runs) + vectors)) + copies

    def _cycles(self, isa: Isa, tactic: Tile, items: int) -> float:
        configurations = self._configurations(isa, tactic, items)
        return super()._cycles(isa, tactic, items) + self.unit.configure_cycles * configurations

    def _configurations(self, isa: Isa, tile: Tile, items: int) -> int:
        """Estimate how often a batch configures the registers: where tiles or panels of two sizes follow each other."""
        flat, rows = self.flat, self.tile_rows(tile)
        panels = pieces(self.problem.cout, tile.vectors * isa.lanes)
        if self.by_batch:
            images, blocks, changes = 1, 1, 2 * (items * flat.cols % tile.cols != 0)
        elif flat.rows == 1:
            images, blocks, changes = items, -(-rows // self.block(tile)), 2 * (flat.cols % tile.cols != 0)
        else:
            widths = len(set(self.widths(tile)))
            images, blocks = items * self.planes.count, -(-rows // self.block(tile))
            changes = rows * widths * (widths > 1) + 2 * (flat.rows % tile.rows != 0)
        visits = sum(count for _, count in panels)
        return 1 + images * (visits * changes + 2 * blocks * (len({isa.vectors_for(couts) for couts, _ in panels}) > 1))

    # ---- constants
    def packing_anywhere(self, tactic: Tile) -> Any:
        problem = self.problem
        return (problem.precision, problem.weights, problem.groups, problem.cin, problem.cout, problem.taps,
                problem.y.dtype, problem.y.shape[-1], self.run, tactic.vectors)

    def pack(self, isa: Isa, tactic: Tile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        panels, group = cout_panels(self.problem, isa, tactic.vectors), self.unit.group
        stored = self.arithmetic(isa).store_weights(constants["weights"])
        runs = np.ascontiguousarray(self.runs(stored)).view(np.int8)        # [cout][run][byte]
        blocks, done = np.zeros((*runs.shape[:2], len(self.block_starts), self.depth), np.int8), 0
        for number, start in enumerate(self.block_starts):
            part = runs[..., done:start + self.depth]
            blocks[:, :, number, done - start:done - start + part.shape[-1]] = part
            done = start + self.depth
        quads = blocks.reshape(len(blocks), -1, self.depth // group, group)     # [cout][block][quad][byte]
        packed = [quads[panel].transpose(2, 0, 3, 1, 4).ravel() for panel in panels]    # [block][vector][quad][lane]...
        return np.concatenate(packed), pack_program(self.problem, panels, constants)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        wide, staged = self.cut(tactic.rows, tactic.cols).wide, self.run if self.staged else 0
        items = 1 if module.trace else self.items_together
        MatrixLoops(self, module, name, isa, tactic, self.depth, self.block_starts, wide, staged, items).emit()
